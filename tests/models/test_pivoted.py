"""Pivoted checkpoints in transformers and PEFT: loaded, saved, placed, trained and fused like any other."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import PreTrainedModel

from compression_runs import edit_tensors
from neuronmm.kernels import Form
from neuronmm.models import FAMILIES, Int8Linear, LowRankLinear, LowRankSwiGLU, UserError, fuse
from neuronmm.models.contents import inspect
from neuronmm.models.load import load_pretrained
from neuronmm.models.patch import patch
from tiny_models import (
    fill_tiny,
    load_plain,
    make_spec,
    make_tiny,
    make_tokens,
    pivoted_spec,
    train_tiny,
    write_checkpoint,
)

PIVOTS = "model.layers.1.self_attn.k_proj.pivots"


def pivoted_checkpoint(
    folder: Path, model_type: str = "llama", *, shared: bool = False, factors: str = "model", **kwargs: Any
) -> PreTrainedModel:
    """Write a checkpoint whose linears are pivoted; the patched model it was saved from."""
    model, spec = make_tiny(model_type, **kwargs), pivoted_spec(shared=shared, factors=factors)
    write_checkpoint(model, fill_tiny(model, spec), folder)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(make_tokens()).logits


def expanded(model: Any) -> Any:
    """A copy with dense linears of the same matrices."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, LowRankLinear):
            plain = module.factors.expanded(torch.float64)
            linear = torch.nn.Linear(module.in_features, module.out_features, plain.bias is not None)
            with torch.no_grad():
                linear.weight.copy_(plain.B.double() @ plain.A.double())
                if plain.bias is not None:
                    linear.bias.copy_(plain.bias)
            model.set_submodule(name, linear)
    return model


@pytest.mark.parametrize("shared", [False, True], ids=["own", "one P"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_round_trip(model_type: str, shared: bool, tmp_path: Path) -> None:
    model = pivoted_checkpoint(tmp_path / "one", model_type, shared=shared)
    torch.testing.assert_close(logits(expanded(model)), logits(model), rtol=1e-4, atol=1e-4)
    loaded = load_plain(tmp_path / "one")
    assert torch.equal(logits(loaded), logits(model))
    forms = {module.form for module in loaded.modules() if isinstance(module, LowRankLinear)}
    assert forms == {Form.ROWS, Form.COLUMNS, *([Form.TWO] if shared else [])}
    assert any(isinstance(module, LowRankSwiGLU) for module in loaded.modules())
    loaded.save_pretrained(tmp_path / "two")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert inspect(tmp_path / "two").spec == pivoted_spec(shared=shared)
    assert torch.equal(logits(load_plain(tmp_path / "two")), logits(model))
    assert torch.equal(logits(load_pretrained(tmp_path / "two", torch.float32)), logits(model))


def test_tensor_names_are_those_of_the_format(tmp_path: Path) -> None:
    pivoted_checkpoint(tmp_path, "qwen2")
    stored = {
        name.removeprefix("model.layers.0."): list(tensor.shape)
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
        if "layers.0." in name and "norm" not in name
    }
    assert stored == {
        "mlp.gate_proj.A.weight": [12, 32],
        "mlp.gate_proj.B.weight": [36, 12],
        "mlp.up_proj.A.weight": [16, 32],
        "mlp.up_proj.B.weight": [32, 16],
        "mlp.down_proj.A.weight": [8, 40],
        "mlp.down_proj.B.weight": [32, 8],
        **{
            f"self_attn.{name}_proj.{part}": shape
            for name, rank, outputs in (("q", 8, 32), ("k", 4, 16), ("v", 4, 16), ("o", 6, 32))
            for part, shape in (
                ("A.weight", [rank, 32]),
                ("B.weight", [outputs - rank, rank]),
                ("pivots", [rank]),
                *([("bias", [outputs])] if name != "o" else []),
            )
        },
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    model = pivoted_checkpoint(tmp_path, "qwen2", dtype=dtype)
    loaded = load_plain(tmp_path, dtype=dtype)
    assert torch.equal(logits(loaded), logits(model))
    for converted in (loaded.half(), loaded.float(), loaded.to(torch.bfloat16)):
        assert converted.get_buffer(PIVOTS).dtype == torch.int32
        assert torch.isfinite(logits(converted)).all()


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_device_maps(device_map: Any, tmp_path: Path) -> None:
    model = pivoted_checkpoint(tmp_path, "qwen2")
    assert torch.allclose(logits(load_plain(tmp_path, device_map=device_map)).cpu(), logits(model), atol=1e-4)


@pytest.mark.parametrize("buffers", [False, True], ids=["weights", "and buffers"])
def test_layers_offloaded_to_disk(buffers: bool, tmp_path: Path) -> None:
    if not buffers and transformers.__version__.startswith("4.47"):
        pytest.skip("transformers 4.47 loses buffers of layers on the disk without offload_buffers")
    model = pivoted_checkpoint(tmp_path / "out", "qwen2")
    where = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    where |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places = {"device_map": where, "offload_folder": str(tmp_path / "offload"), "offload_buffers": buffers}
    loaded = load_plain(tmp_path / "out", **places)
    assert loaded.model.layers[1].mlp.gate_proj.A.weight.is_meta
    assert torch.equal(logits(loaded), logits(model))


def test_int8_factors(tmp_path: Path) -> None:
    model = pivoted_checkpoint(tmp_path / "one", "qwen2", factors="int8")
    loaded = load_plain(tmp_path / "one", dtype=torch.bfloat16).float()
    assert any(isinstance(module, Int8Linear) for module in loaded.modules())
    torch.testing.assert_close(logits(load_plain(tmp_path / "one")), logits(model))
    torch.testing.assert_close(logits(expanded(model)), logits(model), rtol=1e-3, atol=1e-3)
    load_plain(tmp_path / "one").save_pretrained(tmp_path / "two")
    assert torch.equal(logits(load_plain(tmp_path / "two")), logits(load_plain(tmp_path / "one")))


@pytest.mark.parametrize("shared", [False, True], ids=["own", "one P"])
@pytest.mark.parametrize("impl", ["auto", "torch", "naive", "reference"])
def test_fusing_changes_nothing(impl: str, shared: bool) -> None:
    model = make_tiny("qwen2")
    fill_tiny(model, pivoted_spec(shared=shared))
    expected = logits(model)
    torch.testing.assert_close(logits(fuse(model, impl)), expected, rtol=1e-4, atol=1e-4)


def test_torch_compile_traces_it() -> None:
    model = make_tiny()
    fill_tiny(model, pivoted_spec())
    x = torch.randn(3, 32)
    for module in (model.model.layers[0].mlp, model.model.layers[0].self_attn.q_proj):
        torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), module(x))


@pytest.mark.parametrize("shared", [False, True], ids=["own", "one P"])
def test_adapters_train_save_load_and_merge(shared: bool, tmp_path: Path) -> None:
    pivoted_checkpoint(tmp_path / "base", "qwen2", shared=shared)
    lora = get_peft_model(load_plain(tmp_path / "base"), LoraConfig(r=2, target_modules=["A", "B"]))
    losses = train_tiny(lora, steps=4, learning_rate=0.02)
    assert losses[-1] < losses[0]
    with pytest.raises(UserError, match="carries an adapter"):
        fuse(lora)
    trained = logits(lora.eval())
    lora.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load_plain(tmp_path / "base"), tmp_path / "adapter").eval()
    assert torch.allclose(logits(again), trained, atol=1e-5)
    merged = again.merge_and_unload()
    assert torch.allclose(logits(merged), trained, atol=1e-3)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(load_plain(tmp_path / "merged")), logits(merged))
    assert torch.allclose(logits(fuse(merged)), trained, atol=1e-3)


def test_training_reaches_every_factor_and_no_pivot() -> None:
    model = make_tiny("qwen2")
    fill_tiny(model, pivoted_spec())
    model.requires_grad_(True)
    model(make_tokens(), labels=make_tokens()).loss.backward()
    for name, parameter in model.named_parameters():
        if ".A." in name or ".B." in name:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert not [name for name, _ in model.named_parameters() if "pivots" in name]


def put(values: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__setitem__(
        PIVOTS, values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.int32)
    )


def change(name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, edit(tensors[name]).contiguous())


DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
    "decreasing": (put([1, 7, 4, 10]), "increasing numbers from 0 to 15"),
    "repeated": (put([1, 4, 4, 10]), "increasing numbers from 0 to 15"),
    "negative": (put([-1, 4, 7, 10]), "increasing numbers from 0 to 15"),
    "one too large": (put([1, 4, 7, 16]), "increasing numbers from 0 to 15"),
    "largest": (put([1, 4, 7, 2**31 - 1]), "increasing numbers from 0 to 15"),
    "smallest": (put([-(2**31), 4, 7, 10]), "increasing numbers from 0 to 15"),
    "too few": (put([1, 4, 7]), "has shape [3], not [4]"),
    "too many": (put([1, 4, 7, 10, 13]), "has shape [5], not [4]"),
    "a matrix": (put([[1, 4, 7, 10]]), "has shape [1, 4], not [4]"),
    "int64": (put(torch.tensor([1, 4, 7, 10])), "is stored as I64, not as I32"),
    "float": (put(torch.tensor([1.0, 4, 7, 10])), "is stored as F32, not as I32"),
    "bool": (put(torch.tensor([True] * 4)), "is stored as BOOL, not as I32"),
    "missing": (lambda tensors: tensors.__delitem__(PIVOTS), "is in no shard"),
    "an index for a range": (
        lambda tensors: tensors.__setitem__("model.layers.0.mlp.gate_proj.pivots", torch.arange(12).int()),
        "gate_proj.pivots belongs to no part of the model",
    ),
    "C of other rows": (change("model.layers.0.mlp.gate_proj.B.weight", lambda t: torch.cat([t, t])), "not [36, 12]"),
    "D of other columns": (change("model.layers.0.mlp.down_proj.A.weight", lambda t: t[:, 1:]), "not [8, 40]"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_one_clear_line(damage: str, tmp_path: Path) -> None:
    pivoted_checkpoint(tmp_path)
    edit, message = DAMAGES[damage]
    edit_tensors(tmp_path, edit)
    with pytest.raises(UserError) as caught:
        load_pretrained(tmp_path, torch.float32)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["decreasing", "repeated", "negative", "one too large", "missing"])
def test_a_plain_from_pretrained_refuses_hostile_pivots(damage: str, tmp_path: Path) -> None:
    pivoted_checkpoint(tmp_path)
    edit, message = DAMAGES[damage]
    edit_tensors(tmp_path, edit)
    with pytest.raises(UserError) as caught:
        load_plain(tmp_path)
    assert message in str(caught.value) and PIVOTS in str(caught.value)


def test_more_pivots_than_outputs_are_refused_and_leave_the_model_alone() -> None:
    model = make_tiny()
    before = model.state_dict().keys()
    leader, follower = (f"model.layers.0.self_attn.{name}_proj" for name in "kq")
    ranks = {leader: 20, follower: 20}
    patch(make_tiny(), make_spec(ranks, shared={follower: leader}))
    with pytest.raises(UserError, match="cannot have rank 20"):
        patch(model, make_spec(ranks, shared={follower: leader}, forms={leader: {"form": "rows"}}, format=2))
    assert model.state_dict().keys() == before


GATE, DOWN, KEYS = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.k_proj"


@pytest.mark.parametrize(
    ("forms", "message"),
    [
        ({GATE: {"form": "rows", "first": 37}}, "gate_proj"),
        ({GATE: {"form": "rows", "first": 10**30}}, "gate_proj"),
        ({GATE: {"form": "rows", "first": -1}}, "first"),
        ({GATE: {"form": "two"}}, "form"),
        ({GATE: {"form": "rows", "first": 1.5}}, "first"),
        ({DOWN: {"form": "columns", "first": 3}}, "columns"),
        ({KEYS: None}, "forms"),
        ({"model.layers.9.mlp.gate_proj": {"form": "rows", "first": 0}}, "has no rank"),
    ],
    ids=str,
)
def test_hostile_forms_are_one_clear_line(forms: dict[str, Any], message: str, tmp_path: Path) -> None:
    pivoted_checkpoint(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["forms"].update(forms)
    file.write_text(json.dumps(config))
    for load in (lambda: load_pretrained(tmp_path, torch.float32), lambda: load_plain(tmp_path)):
        with pytest.raises(UserError, match=message) as caught:
            load()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_gate_and_an_up_that_choose_inputs_are_not_stacked() -> None:
    """Their A have other widths. ``compress`` gives them the other form, but the format allows this one."""
    spec = pivoted_spec()
    forms = {name: form.model_dump() for name, form in spec.forms.items()}
    for name in forms:
        if name.endswith(("gate_proj", "up_proj")):
            forms[name] = {"form": "columns"}
    model = make_tiny()
    fill_tiny(model, make_spec(spec.ranks, shared=spec.shared, forms=forms, format=2))
    expected = logits(model)
    torch.testing.assert_close(logits(fuse(model)), expected, rtol=1e-4, atol=1e-4)
