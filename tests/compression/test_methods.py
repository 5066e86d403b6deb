"""Every method and its optional steps, end to end on tiny checkpoints."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compression_runs import EVERYTHING, config, edit_tensors, tensors
from neuronmm.compression import plan, streaming
from neuronmm.compression.pipeline import compress
from neuronmm.compression.ranks import Linear
from neuronmm.kernels import quantise
from neuronmm.models.families import LAYERS, TARGETS
from neuronmm.models.load import load_pretrained
from neuronmm.models.lowrank import FACTORS


@pytest.mark.parametrize("method", ["svd", "asvd", "whitened", "anchored"])
@pytest.mark.parametrize(
    "extra", [{}, {"share_a": "auto"}, {"allocation": "global"}, {"refine": "fast"}, {"recover": "factors"}], ids=str
)
@pytest.mark.parametrize("form", ["two", "pivoted"])
def test_every_method_writes_what_it_reports(
    method: str, extra: dict[str, str], form: str, dense: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = dense("qwen2"), tmp_path / "out"
    report = compress(source, out, config(method=method, targets="all", ratio=0.3, form=form, **extra))
    model = load_pretrained(out, torch.float32)
    assert torch.isfinite(model(torch.randint(3, 64, (2, 9))).logits).all()
    after = {name: tensor for name, tensor in tensors(out).items() if not name.endswith(".pivots")}
    assert sum(t.numel() for t in after.values()) == report["parameters"]["compressed"]
    kept = sum(m["kept_parameters"] for m in report["matrices"])
    assert report["realised_ratio"] == pytest.approx(1 - kept / sum(m["dense_parameters"] for m in report["matrices"]))
    named = {name for m in report["matrices"] for name in (m["name"], *m["sharing"])}
    assert len(named) == 2 * len(TARGETS["all"])
    assert (report["block_loss"] is not None) == ("refine" in extra)
    if report["block_loss"]:
        assert report["block_loss"]["after"] <= report["block_loss"]["before"]
    if not extra:
        untouched = {name: tensor for name, tensor in tensors(source).items() if name in after}
        assert all(torch.equal(after[name], tensor) for name, tensor in untouched.items())


@pytest.mark.parametrize("form", ["two", "pivoted"])
@pytest.mark.parametrize("recover", ["off", "lora"])
def test_int8_factors_are_stored_last_and_reported(
    recover: str, form: str, dense: Callable[..., Path], tmp_path: Path
) -> None:
    source = dense("qwen3", max_shard_size="20KB", dtype=torch.bfloat16)
    settings = {"recover": recover, "share_a": "auto", "targets": "all", "form": form}
    report = compress(source, tmp_path / "out", config(factor_dtype="int8", **settings))
    plain = compress(source, tmp_path / "plain", config(**settings))
    assert (report["factor_dtype"], plain["factor_dtype"]) == ("int8", "model")
    assert report["bytes"]["compressed"] < plain["bytes"]["compressed"] < plain["bytes"]["dense"]
    ids = torch.randint(3, 64, (2, 9))
    model = load_pretrained(tmp_path / "plain", torch.float32)
    exact, rounded = model(ids).logits, load_pretrained(tmp_path / "out", torch.float32)(ids).logits
    for name, weight in model.named_parameters():
        if name.endswith(FACTORS):
            weight.data = quantise(weight.data).dequantise(torch.float32)
    assert 0 < (exact - rounded).norm() <= 2 * (exact - model(ids).logits).norm()
    factors = {name: tensor for name, tensor in tensors(tmp_path / "out").items() if name.endswith(".B.weight")}
    assert factors and all(tensor.dtype == torch.int8 for tensor in factors.values())
    if recover != "off":
        assert report["recovery"]["loss_after"] <= report["recovery"]["loss_before"]


@pytest.mark.parametrize("method", ["whitened", "anchored"])
def test_a_model_that_is_read_layer_by_layer_gives_the_same_bytes(
    method: str, dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, settings = dense("qwen2"), config(**{**EVERYTHING, "method": method})
    compress(source, tmp_path / "kept", settings)
    monkeypatch.setattr(streaming, "RESIDENT_BYTES", 0)
    compress(source, tmp_path / "read", settings)
    assert (tmp_path / "kept/model.safetensors").read_bytes() == (tmp_path / "read/model.safetensors").read_bytes()


@pytest.mark.parametrize(("free", "stays"), [(4.0, True), (3.9, False)])
def test_a_gpu_keeps_a_model_that_fits_in_a_quarter_of_its_memory(
    free: float, stays: bool, dense: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = streaming.StreamedModel(dense(), torch.float32)
    weights = 4 * model.reader.total_parameters()
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free * weights), 100 * weights))
    assert model._stays() == stays


def test_shared_factors_are_those_of_the_stacked_weight(dense: Callable[..., Path], tmp_path: Path) -> None:
    """Gate and up that read the same directions share an A."""
    source, out = dense(), tmp_path / "out"

    def alike(state: dict[str, torch.Tensor]) -> None:
        for index in range(2):
            gate = state[f"{LAYERS}.{index}.mlp.gate_proj.weight"]
            mixed = torch.randn(48, 48, generator=torch.Generator().manual_seed(index)) / 7 @ gate
            state[f"{LAYERS}.{index}.mlp.up_proj.weight"] = mixed

    edit_tensors(source, alike)
    report = compress(source, out, config(share_a="auto", ratio=0.2))
    after = tensors(out)
    shared = json.loads((out / "config.json").read_text())["quantization_config"]["shared"]
    assert shared == {f"{LAYERS}.{i}.mlp.up_proj": f"{LAYERS}.{i}.mlp.gate_proj" for i in range(2)}
    assert not any("up_proj.A" in name for name in after)
    assert [m["sharing"] for m in report["matrices"]].count([]) == 2  # the down projections
    model = load_pretrained(out, torch.float32)
    mlp = model.model.layers[0].mlp
    assert mlp.up_proj.A is mlp.gate_proj.A


@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_an_a_is_shared_where_it_pays_at_the_allocated_ranks(
    allocation: str, dense: Callable[..., Path], tmp_path: Path
) -> None:
    """At uniform ranks a gate that needs many ranks gains from an up that needs few; else it stays dense."""
    source, out = dense(), tmp_path / "out"

    def unlike(state: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for name, weight in state.items():
            if name.endswith(("up_proj.weight", "down_proj.weight")):
                rows, columns = weight.shape
                left, right = (torch.randn(size, 3, generator=generator) for size in (rows, columns))
                state[name] = left @ right.T / 10

    edit_tensors(source, unlike)
    compress(source, out, config(share_a="auto", ratio=0.3, allocation=allocation))
    spec = json.loads((out / "config.json").read_text())["quantization_config"]
    gates = [f"{LAYERS}.{index}.mlp.gate_proj" for index in range(2)]
    assert list(spec["shared"].values()) == (gates if allocation == "uniform" else [])
    assert [gate in spec["ranks"] for gate in gates] == [allocation == "uniform"] * 2


def test_losses_with_a_shared_a_and_with_separate_ones_have_one_scale(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At rank 0 both lose the sum of the relative energies, with a shared A and with separate ones."""
    seen = list[str]()

    def compare(
        joint: Linear, ranks: dict[str, int | None], apart: dict[str, torch.Tensor], together: torch.Tensor
    ) -> bool:
        seen.append(joint.name)
        everything = sum(float(apart[member.name].sum()) for member in joint.members)
        assert float(together.sum()) == pytest.approx(everything, rel=1e-5)
        return True

    monkeypatch.setattr(plan, "sharing_pays", compare)
    compress(dense("qwen2"), tmp_path / "out", config(share_a="auto", targets="all", ratio=0.3))
    assert len(seen) == 4  # queries and gate, in two layers


@pytest.mark.parametrize("ratio", [0.05, 0.2])
def test_the_fractions_of_every_stage_add_up_to_one(ratio: float, dense: Callable[..., Path], tmp_path: Path) -> None:
    """At 0.05 one layer stays dense and is not refined."""
    fractions: dict[str, float] = defaultdict(float)

    def progress(stage: str, fraction: float) -> None:
        fractions[stage] += fraction

    report = compress(dense(), tmp_path / "out", config(ratio=ratio, **EVERYTHING), progress=progress)
    whole = {
        index for index in range(2) if not any(f".{index}." in m["name"] and m["rank"] for m in report["matrices"])
    }
    assert bool(whole) == (ratio == 0.05)
    assert {"sampling text", "measuring spectra", "compressing", "comparing"} == set(fractions)
    assert fractions == pytest.approx(dict.fromkeys(fractions, 1.0))
