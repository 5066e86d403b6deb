"""A checkpoint as NxD Inference loads it, without NxD: names, shapes and values; and what NxD cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from neuronmm.models import FAMILIES, UserError
from neuronmm.models.families import LINEARS, TARGETS
from neuronmm.models.neuronx import nxd_weights
from neuronmm.models.neuronx.checkpoint import Checkpoint
from neuronmm.models.neuronx.nxd_weights import PATHS, convert, parameters, replaced
from neuronmm.models.neuronx.settings import Settings
from tiny_models import (
    compress_tiny,
    fill_tiny,
    layer_ranks,
    make_tiny,
    pivot_tiny,
    shared_spec,
    write_checkpoint,
)


@pytest.fixture(autouse=True)
def any_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny ranks have no full tiles."""
    monkeypatch.setattr("neuronmm.models.neuronx.intermediate.TILE", 1)


def write(folder: Path, model_type: str = "llama", kind: str = "two", **shape: float) -> Path:
    """Write a tiny checkpoint; ``two``: layer 0's q, gate, up and down, and layer 1's gate, are factorised."""
    model = make_tiny(model_type, **shape)
    if kind == "shared":
        return write_checkpoint(model, fill_tiny(model, shared_spec()), folder)
    if kind == "pivoted":
        return write_checkpoint(model, pivot_tiny(model), folder)
    if kind == "dense":
        model.save_pretrained(folder)
        return folder
    ranks = layer_ranks((*TARGETS["mlp"], "self_attn.q_proj"), 1)
    return write_checkpoint(model, compress_tiny(model, {**ranks, "model.layers.1.mlp.gate_proj": 12}), folder)


def state_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the state dict that NxD reads: every tensor, without the prefix "model."."""
    return {name.removeprefix("model."): torch.zeros(1) for name in checkpoint._files}


@pytest.mark.parametrize("cores", [1, 2, 4])
@pytest.mark.parametrize(
    ("model_type", "kind"), [*((family, "two") for family in FAMILIES), ("llama", "shared"), ("llama", "pivoted")]
)
def test_nxd_cuts_each_parameter_into_the_cores_parts(tmp_path: Path, model_type: str, kind: str, cores: int) -> None:
    checkpoint = Checkpoint(write(tmp_path, model_type, kind), torch.float32)
    whole = nxd_weights.shards(checkpoint, cores)
    state = convert(state_of(checkpoint), whole)
    for index, plan in enumerate(whole.plans):
        assert plan.fused == ()  # NxD's own norms stay
        parts = whole.parts(index)
        for name in replaced(plan):
            prefix = f"layers.{index}.{PATHS[name]}."
            expected = parameters(plan, name, 4)
            assert {key.removeprefix(prefix) for key in state if key.startswith(prefix)} == set(expected)
            for kind_of, parameter in expected.items():
                tensor = state[prefix + kind_of]
                cut = tensor.chunk(cores) if parameter.split else [tensor] * cores
                own = parts[f"{name}.{kind_of}"] * (1 if parameter.split else cores)
                assert all(part.shape == parameter.shape for part in cut)
                assert all(torch.equal(a, b) for a, b in zip(cut, own, strict=True))


def test_what_is_not_replaced_stays(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path), torch.float32)
    state = convert(state_of(checkpoint), nxd_weights.shards(checkpoint, 1))
    assert {"norm.weight", "embed_tokens.weight", "layers.0.input_layernorm.weight"} <= set(state)
    assert {"layers.0.self_attn.o_proj.weight", "layers.1.self_attn.q_proj.weight"} <= set(state)
    gone = [f"layers.0.{LINEARS[name]}" for name in ("q", "k", "v", "gate")] + [f"layers.1.{LINEARS['up']}"]
    assert not [name for name in state if name.startswith(tuple(f"{linear}.weight" for linear in gone))]
    assert not [name for name in state if "A.weight" in name or "pivots" in name]


def test_a_dense_checkpoint_stays_as_it_is(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path, kind="dense"), torch.float32)
    state = state_of(checkpoint)
    assert convert(state, nxd_weights.shards(checkpoint, 2)) == state


def test_dense_linears_of_a_replaced_group_are_read_too(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path, "qwen2"), torch.float32)
    plan = nxd_weights.shards(checkpoint, 2).plans[0]
    assert replaced(plan) == ("q", "k", "v", "gate", "up", "down")
    assert set(parameters(plan, "q", 4)) == {"A", "B", "bias"} and set(parameters(plan, "k", 4)) == {"W", "bias"}
    assert replaced(nxd_weights.shards(checkpoint, 2).plans[1]) == ("gate", "up", "down")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
REFUSED: list[tuple[str, dict[str, Any], Settings, str]] = [
    ("qwen3", {"rope_scaling": LLAMA3}, Settings(torch.float32), "no rope scaling for qwen3"),
    ("llama", {}, Settings(torch.float16), "has no float16; emulate with --dtype fp32 or bf16"),
    ("llama", {}, Settings(torch.bfloat16, 2), "bfloat16 on 1 core only"),
]


@pytest.mark.parametrize(("model_type", "changes", "settings", "message"), REFUSED, ids=[case[3] for case in REFUSED])
def test_what_nxd_cannot_run_is_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any], settings: Settings, message: str
) -> None:
    file = write(tmp_path, model_type, "dense") / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "rope_parameters"}
    file.write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match=message):
        nxd_weights.split(Checkpoint(tmp_path, settings.dtype), settings, emulated=True)


@pytest.mark.skipif(transformers.__version__.startswith("4.47"), reason="this transformers has no such Qwen2")
def test_a_qwen2_with_heads_of_another_size_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "qwen2", "dense", head_dim=4)
    with pytest.raises(UserError, match="a Qwen2 with heads of hidden size / heads only"):
        nxd_weights.split(Checkpoint(tmp_path, torch.float32), Settings(torch.float32), emulated=True)


def test_bfloat16_on_several_cores_is_refused_in_the_cpu_mode_only(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path), torch.bfloat16)
    assert nxd_weights.split(checkpoint, Settings(torch.bfloat16, 2), emulated=False).tp_degree == 2
