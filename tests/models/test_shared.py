"""Linears that share one A: one tensor in the file and one in memory, after every operation on the model."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from compression_runs import edit_tensors
from neuronmm.models import FAMILIES, UserError, fuse
from neuronmm.models.load import load_pretrained
from neuronmm.models.patch import patch
from tiny_models import fill_tiny, load_plain, make_spec, make_tiny, make_tokens, shared_spec, write_checkpoint

SPEC = shared_spec()


def shared_checkpoint(folder: Path, model_type: str = "llama", **kwargs: Any) -> PreTrainedModel:
    """Write a checkpoint with every possible shared A, and return the patched model."""
    model = make_tiny(model_type, **kwargs)
    write_checkpoint(model, fill_tiny(model, SPEC), folder)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(make_tokens()).logits


def assert_one_copy(model: Any) -> None:
    """Check that every follower uses its leader's weight, and that the model counts it once."""
    for name, leader in SPEC.shared.items():
        assert model.get_submodule(name).A.weight is model.get_submodule(leader).A.weight
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert set(names) == set(model.state_dict())
    assert not [name for name in names if name.removesuffix(".A.weight") in SPEC.shared]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_round_trip(model_type: str, tied: bool, tmp_path: Path) -> None:
    model = shared_checkpoint(tmp_path / "one", model_type, tied=tied)
    assert_one_copy(model)
    loaded = load_plain(tmp_path / "one")
    assert_one_copy(loaded)
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "two")
    again = load_plain(tmp_path / "two")
    assert_one_copy(again)
    assert torch.equal(logits(again), logits(model))
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert not [name for name in one if name.removesuffix(".A.weight") in SPEC.shared]
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


def test_loading_logs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared_checkpoint(tmp_path / "out", tied=True)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)  # the transformers logger does not propagate records
    try:
        _, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", output_loading_info=True, low_cpu_mem_usage=True
        )
    finally:
        logger.removeHandler(caplog.handler)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    model = shared_checkpoint(tmp_path / "out", dtype=dtype)
    loaded = load_plain(tmp_path / "out", dtype=dtype)
    assert torch.equal(logits(loaded), logits(model))
    assert_one_copy(loaded.float())


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_device_maps(device_map: Any, tmp_path: Path) -> None:
    model = shared_checkpoint(tmp_path / "out")
    loaded = load_plain(tmp_path / "out", device_map=device_map)
    assert_one_copy(loaded)
    assert torch.allclose(logits(loaded).cpu(), logits(model), atol=1e-4)


def test_layers_offloaded_to_disk(tmp_path: Path) -> None:
    model = shared_checkpoint(tmp_path / "out", "qwen2")
    where = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    where |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    loaded = load_plain(tmp_path / "out", device_map=where, offload_folder=str(tmp_path / "offload"))
    assert loaded.model.layers[1].mlp.up_proj.A.weight.is_meta
    assert torch.equal(logits(loaded), logits(model))


def test_many_small_shards(tmp_path: Path) -> None:
    model = make_tiny()
    write_checkpoint(model, fill_tiny(model, SPEC), tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert torch.equal(logits(load_plain(tmp_path)), logits(model))


def test_a_copy_shares_within_itself_only(tmp_path: Path) -> None:
    model = shared_checkpoint(tmp_path / "out")
    twin = copy.deepcopy(model)
    assert_one_copy(twin)
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.A.weight.zero_()
    assert model.model.layers[0].mlp.gate_proj.A.weight.abs().sum() > 0


@pytest.mark.parametrize("impl", ["auto", "torch", "naive"])
def test_fusing_keeps_one_copy(impl: str) -> None:
    model = make_tiny("qwen2")
    fill_tiny(model, SPEC)
    expected = logits(model)
    assert torch.allclose(logits(fuse(model, impl)), expected, rtol=1e-4, atol=1e-4)
    assert_one_copy(model)
    mlp = model.model.layers[0].mlp
    weight = mlp.gate_proj.A.weight
    assert weight.untyped_storage().nbytes() == weight.nbytes


def test_training_reaches_the_shared_factor_from_every_linear() -> None:
    model = make_tiny()
    fill_tiny(model, SPEC)
    mlp = model.model.layers[0].mlp
    x = torch.randn(3, 32)
    mlp.gate_proj(x).sum().backward()
    alone = mlp.gate_proj.A.weight.grad.clone()
    mlp.up_proj(x).sum().backward()
    assert not torch.allclose(mlp.gate_proj.A.weight.grad, alone)


def test_torch_compile_traces_it() -> None:
    model = make_tiny()
    fill_tiny(model, SPEC)
    mlp = model.model.layers[0].mlp
    x = torch.randn(3, 32)
    assert torch.equal(torch.compile(mlp, backend="eager", fullgraph=True)(x), mlp(x))


def test_one_adapter_serves_all_that_share(tmp_path: Path) -> None:
    """A LoRA on a shared A is one adapter; it changes every linear that uses the A, and merges into the one weight."""
    shared_checkpoint(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["A", "B"], task_type="CAUSAL_LM", init_lora_weights=False)
    lora = get_peft_model(load_plain(tmp_path / "base"), config)
    mlp = lora.base_model.model.model.layers[0].mlp
    assert mlp.up_proj.A is mlp.gate_proj.A and type(mlp.up_proj.A).__name__ == "Linear"
    assert not [name for name, _ in lora.named_parameters() if ".up_proj.A." in name]
    with pytest.raises(UserError, match="carries an adapter"):
        fuse(lora)
    moved = logits(lora.eval())
    assert not torch.allclose(moved, logits(load_plain(tmp_path / "base")), atol=1e-3)
    lora.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load_plain(tmp_path / "base"), tmp_path / "adapter").eval()
    assert torch.allclose(logits(again), moved, atol=1e-5)
    merged = again.merge_and_unload()
    assert_one_copy(merged)
    assert torch.allclose(logits(merged), moved, atol=1e-3)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(load_plain(tmp_path / "merged")), logits(merged))
    assert torch.allclose(logits(fuse(merged)), moved, atol=1e-3)


def test_an_adapter_on_a_followers_a_alone_is_refused() -> None:
    """A follower has no A of its own, so PEFT finds no such module."""
    model = make_tiny()
    fill_tiny(model, SPEC)
    with pytest.raises(ValueError, match=r"up_proj\.A"):
        get_peft_model(model, LoraConfig(r=2, target_modules=["up_proj.A"]))


def test_inputs_of_other_widths_are_refused_and_leave_the_model_alone() -> None:
    model = make_tiny()
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(40, 48, bias=False)
    before = model.state_dict().keys()
    with pytest.raises(UserError, match="their inputs have 40 and 32 features") as caught:
        patch(model, SPEC)
    assert "\n" not in str(caught.value)
    assert model.state_dict().keys() == before


def test_a_second_patch_may_not_use_a_leader_of_the_first() -> None:
    """One spec must name both."""
    with pytest.raises(UserError, match=r"shared: .*gate_proj has no rank"):
        make_spec(
            {"model.layers.0.mlp.up_proj": 8}, shared={"model.layers.0.mlp.up_proj": "model.layers.0.mlp.gate_proj"}
        )


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def store(name: str, like: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, tensors[like].clone())


LEADER, FOLLOWER = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without(f"{LEADER}.A.weight"), r"gate_proj\.A\.weight is in no shard"),
        (without(f"{FOLLOWER}.B.weight"), r"up_proj\.B\.weight is in no shard"),
        (store(f"{FOLLOWER}.A.weight", f"{LEADER}.A.weight"), r"up_proj\.A\.weight belongs to no part of the model"),
    ],
    ids=["leader's A lost", "follower's B lost", "follower's A stored"],
)
def test_a_file_that_disagrees_is_one_clear_line(
    damage: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    shared_checkpoint(tmp_path)
    edit_tensors(tmp_path, damage)
    with pytest.raises(UserError, match=message) as caught:
        load_pretrained(tmp_path, torch.float32)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_from_before_there_was_sharing_loads(tmp_path: Path) -> None:
    model = make_tiny()
    spec = make_spec({LEADER: 8, FOLLOWER: 8})
    write_checkpoint(model, fill_tiny(model, spec), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]["shared"]
    path.write_text(json.dumps(config))
    assert torch.equal(logits(load_plain(tmp_path)), logits(model))
