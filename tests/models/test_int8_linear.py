"""8-bit factors: stored in int8, computed in the model's precision, with the features of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from compression_runs import edit_tensors
from neuronmm.models import FAMILIES, Int8Linear, UserError, fuse
from neuronmm.models.load import load_pretrained
from tiny_models import fill_tiny, load_plain, logits, make_tiny, make_tokens, specs_of, write_checkpoint

SPECS = specs_of("int8")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def int8_checkpoint(folder: Path, model_type: str = "llama", kind: str = "own A", **kwargs: Any) -> PreTrainedModel:
    """Write a checkpoint with int8 factors, and return the patched model."""
    model = make_tiny(model_type, **kwargs)
    write_checkpoint(model, fill_tiny(model, SPECS[kind]), folder)
    return model


def dequantised(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model with dequantised weights in ordinary linears."""
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        if isinstance(module, Int8Linear):
            linear = torch.nn.Linear(module.in_features, module.out_features, module.bias is not None, dtype=twin.dtype)
            with torch.no_grad():
                linear.weight.copy_(module.weight.float() * module.weight_scale[:, None])
                if module.bias is not None:
                    linear.bias.copy_(module.bias)
            twin.set_submodule(name, linear)
    return twin


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_round_trip(model_type: str, dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    model = int8_checkpoint(tmp_path / "one", model_type, kind, dtype=dtype)
    stored = load_file(tmp_path / "one" / "model.safetensors")
    scale = stored["model.layers.0.mlp.gate_proj.B.weight_scale"]
    assert scale.dtype == torch.float32 and scale.shape == (48,)
    assert stored["model.layers.0.mlp.gate_proj.B.weight"].dtype == torch.int8
    loaded = load_plain(tmp_path / "one", dtype=dtype)
    weights = loaded.state_dict()
    assert all(
        torch.equal(weights[name], tensor) and weights[name].dtype == tensor.dtype for name, tensor in stored.items()
    )
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(logits(loaded), logits(dequantised(model)))
    assert {p.dtype for n, p in loaded.named_parameters() if "weight_scale" not in n} == {dtype, torch.int8}
    assert not any(p.requires_grad for n, p in loaded.named_parameters() if "weight_scale" in n)
    loaded.save_pretrained(tmp_path / "two")
    again = load_file(tmp_path / "two" / "model.safetensors")
    assert again.keys() == stored.keys() and all(torch.equal(again[name], stored[name]) for name in stored)


def test_loading_shows_no_missing_or_unexpected_keys(tmp_path: Path) -> None:
    int8_checkpoint(tmp_path, tied=True)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_an_fp32_checkpoint_in_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """Whether loaded in the dtype or converted to it, the factors are bit-identical."""
    model = int8_checkpoint(tmp_path)
    factors = {name: p for name, p in model.named_parameters() if ".A.weight" in name or ".B.weight" in name}
    for other in (
        load_plain(tmp_path, dtype=dtype),
        load_plain(tmp_path).to(dtype),
        load_plain(tmp_path).to(dtype).float(),
    ):
        there = dict(other.named_parameters())
        assert all(torch.equal(there[name], p) and there[name].dtype == p.dtype for name, p in factors.items())


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_device_maps(device_map: Any, tmp_path: Path) -> None:
    model = int8_checkpoint(tmp_path, kind="shared A", dtype=torch.bfloat16)
    loaded = load_plain(tmp_path, dtype=torch.bfloat16, device_map=device_map)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_layers_offloaded_to_disk(tmp_path: Path) -> None:
    model = int8_checkpoint(tmp_path / "out", "qwen2", "shared A")
    where = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    where |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    loaded = load_plain(tmp_path / "out", device_map=where, offload_folder=str(tmp_path / "offload"))
    assert loaded.model.layers[1].mlp.down_proj.A.weight.is_meta
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("impl", ["auto", "torch", "naive"])
@pytest.mark.parametrize("kind", SPECS)
def test_a_fused_model_gives_the_same_logits(kind: str, impl: str) -> None:
    model = make_tiny("qwen2")
    fill_tiny(model, SPECS[kind])
    expected = logits(model)
    assert torch.allclose(logits(fuse(model, impl)), expected, rtol=1e-4, atol=1e-4)


def test_adapters_go_on_the_other_linears_and_not_on_int8_factors(tmp_path: Path) -> None:
    int8_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"Int8Linear\(.*is not supported"):
        get_peft_model(load_plain(tmp_path), LoraConfig(r=2, target_modules=["A", "B"]))
    lora = get_peft_model(load_plain(tmp_path), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    tokens = make_tokens()
    lora(tokens, labels=tokens).loss.backward()
    moved = {name for name, p in lora.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert moved and all("lora_" in name and ".A.lora" not in name and ".B.lora" not in name for name in moved)


def edit(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[dict[str, torch.Tensor]], None]:
    def apply(tensors: dict[str, torch.Tensor]) -> None:
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed.contiguous()

    return apply


UP = "model.layers.0.mlp.up_proj.B.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit(f"{UP}_scale", lambda _: None), r"up_proj\.B\.weight_scale is in no shard"),
        (edit(f"{UP}_scale", lambda t: t[1:]), r"up_proj\.B\.weight_scale has shape \[47\], not \[48\]"),
        (edit(UP, lambda t: t.float()), r"up_proj\.B\.weight is stored as F32, not as I8"),
        (edit(UP, lambda t: t[:, 1:]), r"up_proj\.B\.weight has shape \[48, 15\], not \[48, 16\]"),
    ],
    ids=["no scale", "short scale", "float weight", "other rank"],
)
def test_a_file_that_disagrees_is_one_clear_line(
    damage: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    int8_checkpoint(tmp_path)
    edit_tensors(tmp_path, damage)
    with pytest.raises(UserError, match=message) as caught:
        load_pretrained(tmp_path, torch.float32)
    assert "\n" not in str(caught.value)


def test_int8_tensors_where_floats_are_promised_are_refused(tmp_path: Path) -> None:
    model = make_tiny()
    spec = fill_tiny(model, SPECS["own A"])
    write_checkpoint(model, spec.model_copy(update={"factors": "model"}), tmp_path)
    with pytest.raises(UserError, match="is stored as I8, not as F64 or F32"):
        load_pretrained(tmp_path, torch.float32)
