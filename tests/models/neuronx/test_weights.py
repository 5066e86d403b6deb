"""A checkpoint cut for NeuronCores: the parts add up to the whole, and what cannot be cut is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from neuronmm.kernels.nki.layout import unpack, unpacked
from neuronmm.kernels.nki.problem import Pivots, Ranks
from neuronmm.models import FAMILIES, UserError
from neuronmm.models.families import LINEARS, TARGETS
from neuronmm.models.neuronx.architecture import Architecture
from neuronmm.models.neuronx.checkpoint import Checkpoint
from neuronmm.models.neuronx.settings import Settings
from neuronmm.models.neuronx.weights import BY_INPUT, NORMS, LayerPlan, Shards, names
from tiny_models import (
    compress_tiny,
    layer_ranks,
    load_plain,
    make_tiny,
    pivot_high,
    pivot_tiny,
    vary_norms,
    write_checkpoint,
)

LINEARS_LOW = (*TARGETS["mlp"], "self_attn.q_proj", "self_attn.k_proj")


@pytest.fixture(autouse=True)
def any_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny ranks have no full tiles."""
    monkeypatch.setattr("neuronmm.models.neuronx.intermediate.TILE", 1)


def shards(folder: Path, tp_degree: int) -> Shards:
    return Shards(Checkpoint(folder, torch.float32), tp_degree)


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("model_type", [*FAMILIES, "pivoted", "pivoted, up leads"])
def test_the_cores_together_compute_every_linear(tmp_path: Path, model_type: str, cores: int) -> None:
    """The results of the cores, each from its own part of the weights, concatenate or add up to the model's own."""
    pivoted = model_type.startswith("pivoted")
    tiny = vary_norms(make_tiny("llama" if pivoted else model_type))
    spec = (
        pivot_tiny(tiny, "up" if "up" in model_type else "gate")
        if pivoted
        else compress_tiny(tiny, layer_ranks(LINEARS_LOW))
    )
    write_checkpoint(tiny, spec, tmp_path)
    cut = shards(tmp_path, cores)
    model = load_plain(tmp_path)
    for index in range(2):
        plan, made = cut.plans[index], cut.layer(index)
        weights = dict(zip(names(plan), made, strict=True))
        assert plan.fused == ("mlp_norm",) and "mlp_norm" not in weights and "input_norm" in weights
        assert all(len(parts) == cores and len({part.shape for part in parts}) == 1 for parts in made)
        assert_the_cores_compute(cut, model, index)


def assert_the_cores_compute(cut: Shards, model: torch.nn.Module, index: int) -> None:
    """The linears of a layer, from their parts on the cores, give what those of ``model`` give."""
    plan = cut.plans[index]
    weights = dict(zip(names(plan), cut.layer(index), strict=True))
    for name, linear in plan.linears:
        module = model.get_submodule(f"model.layers.{index}.{LINEARS[name]}")
        x = torch.randn(5, module.in_features)
        parts = [part(weights, plan, name, core, inputs(cut, index, name, x, core)) for core in range(cut.tp_degree)]
        y = sum(parts) if name in BY_INPUT else gather(cut, index, name, parts)
        if linear.bias:
            whole = weights[f"{name}.bias"]
            y = y + (whole[0] if name in BY_INPUT else gather(cut, index, name, [b[None] for b in whole]))
        if norm := plan.norm_of(name):
            x = x * model.get_parameter(f"model.layers.{index}.{NORMS[norm]}.weight")
        torch.testing.assert_close(y, module(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("rank", [20, 22])
def test_a_linear_above_break_even_is_the_matrix(tmp_path: Path, rank: int, cores: int) -> None:
    """Two factors of q, k, v with one A are 96 r weights, the matrices 2048; an MLP in one kernel stays low-rank."""
    tiny = vary_norms(make_tiny("qwen2"))
    write_checkpoint(tiny, pivot_high(tiny, rank), tmp_path)
    cut = shards(tmp_path, cores)
    plan, last = cut.plans
    dense = {"down"} if rank == 20 else {"q", "k", "v", "down"}
    assert {name for name, linear in plan.linears if linear.expanded} == dense
    assert plan.fused == (("input_norm",) if rank == 20 else ()) and plan["up"].rank == 12
    assert last.mlp is not None and [last[name].rank for name in ("gate", "up", "down")] == [30, 30, 30]
    model = load_plain(tmp_path)
    for index in range(2):
        assert_the_cores_compute(cut, model, index)


@pytest.mark.parametrize("cores", [1, 2])
def test_an_mlp_that_one_kernel_computes_keeps_its_pivots(tmp_path: Path, cores: int) -> None:
    """And no identity block: the packed factors have r (in + out - pivots) numbers, and zeros as padding."""
    tiny = make_tiny()
    write_checkpoint(tiny, pivot_tiny(tiny), tmp_path)
    cut = shards(tmp_path, cores)
    first, second = cut.plans
    if cores == 1:
        assert first.mlp == Ranks(12, 16, 8, 48, Pivots(30, 12), Pivots(20, 16), 8)
        assert second.mlp == Ranks(12, 12, 8, 48, Pivots(34, 12), None, 8)
    else:
        assert first.mlp == Ranks(12, 16, 8, 24, Pivots(15, 6), Pivots(10, 8), 4)
        assert second.mlp == Ranks(12, 12, 8, 24, Pivots(17, 6), None, 4)
    assert first.pivoted == ("gate", "up", "down") and second.pivoted == ("gate", "down")
    weights = dict(zip(names(first), cut.layer(0), strict=True))
    for core in range(cores):
        sizes = {
            name: sum(int(weights[f"{name}.{factor}"][core].count_nonzero()) for factor in "AB")
            for name in first.pivoted
        }
        assert sizes == {n: r * (32 + 48 // cores - r // cores) for n, r in (("gate", 12), ("up", 16), ("down", 8))}


def test_pivots_of_up_are_expanded_where_gate_uses_its_a(tmp_path: Path) -> None:
    tiny = make_tiny()
    write_checkpoint(tiny, pivot_tiny(tiny, "up"), tmp_path)
    plan = shards(tmp_path, 1).plans[1]
    assert plan.mlp == Ranks(12, 12, 8, 48, None, None, 8) and plan.pivoted == ("down",)
    assert set(plan.packings(2)) == {f"{name}.{factor}" for name in ("gate", "up", "down") for factor in "AB"}


def test_a_partly_factorised_mlp_is_expanded(tmp_path: Path) -> None:
    tiny = make_tiny()
    spec = pivot_tiny(tiny)
    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"):
        module = tiny.get_submodule(name)
        parent, _, last = name.rpartition(".")
        setattr(tiny.get_submodule(parent), last, torch.nn.Linear(module.in_features, module.out_features, bias=False))
        del spec.ranks[name], spec.forms[name]
        spec.shared.pop(name, None)
    write_checkpoint(tiny, spec, tmp_path)
    assert [(plan.mlp, plan.pivoted) for plan in shards(tmp_path, 2).plans] == [(None, ()), (None, ())]


def test_norms_are_fused_where_all_their_readers_are_factorised(tmp_path: Path) -> None:
    """And in no float16, which cannot hold the squares of a hidden state."""
    linears = tuple(TARGETS["mlp"]) + tuple(f"self_attn.{name}_proj" for name in "qkv")
    model = make_tiny()
    ranks = {f"model.layers.0.{name}": 8 for name in linears} | {"model.layers.1.mlp.gate_proj": 8}
    write_checkpoint(model, compress_tiny(model, ranks), tmp_path)
    assert [plan.fused for plan in shards(tmp_path, 2).plans] == [("input_norm", "mlp_norm"), ()]
    assert [plan.fused for plan in Shards(Checkpoint(tmp_path, torch.float16), 1).plans] == [(), ()]


def features_of(cut: Shards, index: int) -> Tensor:
    """Return the intermediate features of every core."""
    mlp = cut.mlps[index]
    return torch.arange(48).reshape(cut.tp_degree, -1) if mlp is None else mlp.features


def inputs(cut: Shards, index: int, name: str, x: Tensor, core: int) -> Tensor:
    """Return the part of x that a core reads."""
    if name == "o":
        return heads_of(cut.heads.queries[core], x)
    return x[:, features_of(cut, index)[core]] if name == "down" else x


def heads_of(heads: tuple[int | None, ...], x: Tensor) -> Tensor:
    size = 8
    return torch.cat([x.new_zeros(len(x), size) if h is None else x[:, h * size : (h + 1) * size] for h in heads], 1)


def part(weights: dict[str, list[Tensor]], plan: LayerPlan, name: str, core: int, x: Tensor) -> Tensor:
    """Return a core's part of a linear, with the weights as the graph gets them."""
    linear, packings = plan[name], plan.packings(4)
    if linear.rank is None:
        return x @ weights[f"{name}.W"][core]
    packed = weights[plan.a_of(name)][core], weights[f"{name}.B"][core]
    if f"{name}.A" in packings:
        a, b = (unpacked(packings[f"{name}.{f}"].factor(w)) for f, w in zip("AB", packed, strict=True))
    else:
        a, b = unpack(packed[0], linear.inputs, linear.rank), unpack(packed[1], linear.rank, linear.outputs)
    return x @ a.T @ b.T


def gather(cut: Shards, index: int, name: str, parts: list[Tensor]) -> Tensor:
    """Return the whole output of a linear that is split by output, each head from the first core that has it."""
    if name in ("gate", "up"):
        return torch.cat(parts, 1)[:, features_of(cut, index).flatten().argsort()]
    size, found = 8, {}
    for heads, y in zip(cut.heads.queries if name == "q" else cut.heads.keys, parts, strict=True):
        for slot, head in enumerate(heads):
            found.setdefault(head, y[:, slot * size : (slot + 1) * size])
    assert None not in found or not found[None].any()
    return torch.cat([found[head] for head in sorted(h for h in found if h is not None)], 1)


def test_tensor_parallel_degrees_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    make_tiny().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"tp_degree 5: must be between 1 and the model's 4 attention heads"):
        shards(tmp_path, 5)
    make_tiny(num_attention_heads=8).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="tp_degree 5 does not divide the intermediate size 48"):
        shards(tmp_path, 5)


CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "the Neuron hosts have no rope scaling 'yarn'"),
        ({"head_dim": 12}, "hidden size 32 is not a multiple of the head size 12"),
        ({"vocab_size": None}, None),
        ({"model_type": "mamba"}, "not supported"),
    ],
)
def test_what_the_hosts_cannot_run_is_refused(changes: dict, message: str | None) -> None:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    with pytest.raises(UserError, match=message or "vocab_size: Field required"):
        Architecture.of(config, "config.json")


def test_both_spellings_of_rope_are_read() -> None:
    """transformers 4 has rope_theta, 5 has rope_parameters."""
    old = Architecture.of({**CONFIG, "rope_theta": 5e5}, "config.json")
    new = Architecture.of({**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "config.json")
    assert old == new and old.rope_theta == 5e5 and old.rope_scaling is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_degree": 0}, "tp_degree 0"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"n_positions": 1}, "n_positions 1"),
        ({"layout": "SHB"}, "layout 'SHB'"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Settings(torch.float32, **options)


def test_buckets_are_powers_of_two_up_to_the_longest() -> None:
    assert Settings(torch.float32, n_positions=1000).buckets == [128, 256, 512, 1000]
    assert Settings(torch.float32, n_positions=64).buckets == [64]
