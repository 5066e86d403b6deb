"""Pivoted factors: the same matrices as those of A and B, whatever their shape, rank, sharing or degeneracy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from draws import examples
from neuronmm.compression.layer_pair import LayerPair
from neuronmm.compression.pivoting import DOWN, GATE, UP, LayerFactors, to_pivoted, to_two
from neuronmm.compression.pivots import BOUND, Skeleton
from neuronmm.compression.ranks import Linear
from neuronmm.compression.streaming import run_layer
from neuronmm.kernels import Form, LowRank
from neuronmm.models import LowRankLinear
from tiny_models import make_tiny

Q, K, V, OUT = (f"self_attn.{name}_proj" for name in "qkvo")
MLP = (GATE, UP, DOWN)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def linear(outputs: int, inputs: int, rank: int, bias: bool = False, seed: int = 0) -> LowRank:
    return LowRank(
        drawn(rank, inputs, seed=seed),
        drawn(outputs, rank, seed=seed + 1),
        drawn(outputs, seed=seed + 2) if bias else None,
    )


def product(factors: LowRank) -> Tensor:
    plain = factors.expanded(torch.float64)
    return plain.B @ plain.A


def check_same(before: LayerFactors, after: LayerFactors, tolerance: float = 1e-9) -> None:
    """Every linear is the product it was, in the MLP's new order, and nothing else has changed."""
    assert after.low_rank.keys() == before.low_rank.keys() and after.shared == before.shared
    for name, factors in before.low_rank.items():
        matrix, bias, order = factors.B.double() @ factors.A.double(), factors.bias, after.order
        if order is not None and name in (GATE, UP):
            matrix, bias = matrix[order], None if bias is None else bias[order]
        if order is not None and name == DOWN:
            matrix = matrix[:, order]
        found = after.low_rank[name]
        assert (found.rank, found.in_features, found.out_features) == (
            factors.rank,
            factors.in_features,
            factors.out_features,
        )
        torch.testing.assert_close(product(found), matrix, rtol=0, atol=tolerance * float(matrix.abs().max()))
        assert (found.bias is None) == (bias is None) and (bias is None or torch.equal(found.bias, bias))
    for name, leader in after.shared.items():
        assert after.low_rank[name].A is after.low_rank[leader].A
    if after.order is not None:
        assert torch.equal(after.order.sort().values, torch.arange(len(after.order)))


def pivots_of(factors: LowRank) -> set[int]:
    """The pivots among the outputs, or in the form COLUMNS among the inputs."""
    if factors.form is Form.COLUMNS:
        return set(range(factors.in_features - factors.rank, factors.in_features))
    if isinstance(factors.pivots, int):
        return set(range(factors.pivots, factors.pivots + factors.rank))
    assert factors.pivots is not None and factors.pivots.dtype == torch.int32
    numbers = factors.pivots.tolist()
    assert numbers == sorted(set(numbers)) and numbers[0] >= 0 and numbers[-1] < factors.out_features
    return set(numbers)


@st.composite
def mlps(draw: Any) -> LayerFactors:
    """Some of gate, up and down, gate and up with one A or two, any ranks, with and without biases."""
    hidden, wide = draw(st.integers(1, 12)), draw(st.integers(1, 20))
    names = draw(st.sets(st.sampled_from(MLP), min_size=1))
    ranks = {name: draw(st.integers(1, min(hidden, wide))) for name in MLP}
    bias, seed = draw(st.booleans()), draw(st.integers(0, 99))
    low_rank = {
        name: linear(*((hidden, wide) if name == DOWN else (wide, hidden)), ranks[name], bias, seed)
        for name in MLP
        if name in names
    }
    shared = {}
    if {GATE, UP} <= names and draw(st.booleans()):
        one, other = draw(st.permutations([GATE, UP]))
        low_rank[other] = LowRank(low_rank[one].A, drawn(wide, ranks[one], seed=seed + 7), low_rank[other].bias)
        shared[other] = one
    return LayerFactors(low_rank, shared)


@examples(150)
@given(layer=mlps())
def test_an_mlp_keeps_its_matrices_and_its_pivots_are_ranges(layer: LayerFactors) -> None:
    after = to_pivoted(layer)
    check_same(layer, after)
    forms = {name: factors.form for name, factors in after.low_rank.items() if name not in layer.shared}
    assert forms == {name: Form.COLUMNS if name == DOWN else Form.ROWS for name in forms}
    for name, factors in after.low_rank.items():
        assert (factors.form is Form.TWO) == (name in layer.shared)
        assert factors.form is not Form.ROWS or isinstance(factors.pivots, int)
        if factors.form is not Form.TWO:
            assert factors.A.numel() + factors.B.numel() == factors.rank * (
                factors.in_features + factors.out_features - factors.rank
            )
    if {GATE, UP} <= forms.keys():
        gate, up = pivots_of(after.low_rank[GATE]), pivots_of(after.low_rank[UP])
        assert gate <= up or up <= gate
    assert after.conditions.keys() == forms.keys()
    back = to_two(after)
    assert back.order is None
    check_same(LayerFactors(to_two(after).low_rank, layer.shared), back)
    check_same(LayerFactors({name: one.expanded(torch.float64) for name, one in after.low_rank.items()}, {}),
               LayerFactors(back.low_rank, {}))  # fmt: skip
    again = to_pivoted(back)
    check_same(back, again)
    assert {n: f.form for n, f in again.low_rank.items()} == {n: f.form for n, f in after.low_rank.items()}


@examples(60)
@given(
    heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    hidden=st.integers(4, 16),
    seed=st.integers(0, 99),
    share=st.sampled_from(["", "qkv", "kq", "vk"]),
    data=st.data(),
)
def test_attention_keeps_its_matrices_and_its_order(
    heads: int, groups: int, hidden: int, seed: int, share: str, data: st.DataObject
) -> None:
    outputs = {Q: 4 * heads * groups, K: 4 * heads, V: 4 * heads}
    low_rank = {}
    for number, (name, size) in enumerate(outputs.items()):
        rank = data.draw(st.integers(1, min(size, hidden)))
        low_rank[name] = linear(size, hidden, rank, bias=True, seed=seed + 5 * number)
    shared = {}
    if share:
        leader, *others = (f"self_attn.{name}_proj" for name in share)
        rank = data.draw(st.integers(1, hidden))
        low_rank[leader] = linear(outputs[leader], hidden, rank, bias=True, seed=seed)
        for name in others:
            low_rank[name] = LowRank(low_rank[leader].A, drawn(outputs[name], rank, seed=seed + 9))
            shared[name] = leader
    layer = LayerFactors(low_rank, shared)
    after = to_pivoted(layer)
    assert after.order is None
    check_same(layer, after)
    for name, factors in after.low_rank.items():
        leader = shared.get(name, name)
        pivoted = name == leader and factors.rank <= factors.out_features
        assert factors.form is (Form.ROWS if pivoted else Form.TWO)
        if pivoted:
            assert len(pivots_of(factors)) == factors.rank
            assert isinstance(factors.pivots, Tensor)
    check_same(layer, to_two(after))


def swiglu(hidden: int, wide: int, ranks: tuple[int, int, int], shared: bool, seed: int = 0) -> LayerFactors:
    gate, up, down = ranks
    low_rank = {GATE: linear(wide, hidden, gate, seed=seed), UP: linear(wide, hidden, up, seed=seed + 3)}
    if shared:
        low_rank[UP] = low_rank[UP]._replace(A=low_rank[GATE].A)
    low_rank[DOWN] = linear(hidden, wide, down, seed=seed + 6)
    return LayerFactors(low_rank, {UP: GATE} if shared else {})


ALIGNED = [
    (32, 96, (8, 16, 24)),
    (32, 64, (16, 8, 16)),
    (48, 48, (40, 32, 40)),
    (32, 96, (24, 24, 8)),
    (16, 128, (8, 8, 8)),
]


@pytest.mark.parametrize("shared", [False, True], ids=["two A", "one A"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("hidden", "wide", "ranks"), ALIGNED)
def test_ranges_start_and_overlap_at_multiples_of_the_tile(
    hidden: int, wide: int, ranks: tuple[int, int, int], seed: int, shared: bool
) -> None:
    ranks = (ranks[0], ranks[0] if shared else ranks[1], ranks[2])
    layer = swiglu(hidden, wide, ranks, shared, seed)
    after = to_pivoted(layer)
    check_same(layer, after)
    sets = [pivots_of(factors) for name, factors in after.low_rank.items() if name not in layer.shared]
    for pivots in sets:
        assert min(pivots) % 8 == 0 and len(pivots) % 8 == 0
        assert all(len(pivots & others) % 8 == 0 for others in sets)


@examples(80)
@given(
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 40),
    seed=st.integers(0, 999),
    spread=st.floats(0, 6),
    data=st.data(),
)
def test_no_coefficient_exceeds_the_bound(outputs: int, inputs: int, seed: int, spread: float, data: Any) -> None:
    rank = data.draw(st.integers(1, min(outputs, inputs)))
    scales = torch.logspace(0, -spread, rank, dtype=torch.float64)
    A, B = drawn(rank, inputs, seed=seed), drawn(outputs, rank, seed=seed + 1) * scales
    skeleton = Skeleton(A, B)
    assert not skeleton.coefficients.numel() or float(skeleton.coefficients.abs().max()) <= BOUND * (1 + 1e-6)
    assert torch.equal(skeleton.pivots, skeleton.pivots.sort().values)
    assert torch.equal(torch.cat([skeleton.pivots, skeleton.others]).sort().values, torch.arange(outputs))
    W = B @ A
    torch.testing.assert_close(skeleton.rows, W[skeleton.pivots], rtol=0, atol=1e-9 * float(W.abs().max()))
    rebuilt = skeleton.coefficients @ skeleton.rows
    torch.testing.assert_close(rebuilt, W[skeleton.others], rtol=0, atol=1e-8 * float(W.abs().max()))
    torch.testing.assert_close(skeleton.express(B)[skeleton.others], skeleton.coefficients, rtol=1e-6, atol=1e-6)
    condition = skeleton.condition
    assert condition is not None and condition >= 1 - 1e-9
    assert condition == pytest.approx(float(torch.linalg.cond(W[skeleton.pivots])), rel=1e-3)


@pytest.mark.parametrize("ranks", [(24, 24), (24, 16), (16, 24), (40, 8), (1, 1), (48, 48), (48, 1)], ids=str)
@pytest.mark.parametrize("wide", [48, 120])
def test_matched_pivots_are_good_for_both(wide: int, ranks: tuple[int, int]) -> None:
    """Pivots of one in the other's set; no exchange, of both or of one, enlarges the product of their volumes."""
    high, low = sorted(ranks, reverse=True)
    Bs = drawn(wide, high), drawn(wide, low, seed=1)
    large = Skeleton(drawn(high, 48, seed=2), Bs[0])
    small = Skeleton(drawn(low, 48, seed=3), Bs[1], large.mask)

    def volume() -> float:
        sizes = [torch.linalg.slogdet(B[one.pivots]).logabsdet for B, one in zip(Bs, (large, small), strict=True)]
        return float(sum(sizes))

    before = volume()
    large.match(small)
    assert volume() >= before - 1e-9
    assert bool(large.mask[small.pivots].all())
    for one, B in ((large, Bs[0]), (small, Bs[1])):
        torch.testing.assert_close(one.coefficients @ B[one.pivots], B[one.others], rtol=0, atol=1e-8)
    for leave, enter in ((i, j) for i in range(low) for j in range(wide - high)):
        row = large.others[enter]
        own = large.coefficients[enter, (large.pivots == small.pivots[leave]).nonzero().item()]
        other = small.coefficients[(small.others == row).nonzero().item(), leave]
        assert float((own * other).abs()) <= BOUND * (1 + 1e-6)


def rounding_error(factors: LowRank) -> float:
    """What bf16 does to a product of factors, relative to its norm."""
    rounded = factors._replace(A=factors.A.bfloat16(), B=factors.B.bfloat16())
    return float((product(rounded) - product(factors)).norm() / product(factors).norm())


def test_common_pivots_round_as_well_as_ones_own() -> None:
    layer = swiglu(128, 512, (64, 64, 96), shared=False)
    common = to_pivoted(layer).low_rank
    for name, factors in layer.low_rank.items():
        own = to_pivoted(LayerFactors({name: factors}, {})).low_rank[name]
        error, least = rounding_error(common[name]), rounding_error(own)
        assert error <= min(0.012, 1.5 * least), (name, error, least)


def test_moved_pivots_are_never_almost_dependent() -> None:
    skeleton = Skeleton(drawn(8, 20), drawn(40, 8, seed=1))
    first = skeleton.mask
    skeleton.move(5, enter=~first, leave=first)
    assert int((skeleton.mask & first).sum()) >= 3
    assert float(skeleton.coefficients.abs().max()) <= 2 * BOUND


def degenerate(kind: str) -> tuple[Tensor, Tensor]:
    A, B = drawn(6, 10), drawn(15, 6, seed=1)
    if kind == "zero matrix":
        return A, torch.zeros_like(B)
    if kind == "zero A":
        return torch.zeros_like(A), B
    if kind == "rank-deficient B":
        return A, B[:, :2] @ drawn(2, 6, seed=2)
    if kind == "rank-deficient A":
        return A[:, :1] @ drawn(1, 10, seed=2), B
    if kind == "repeated rows":
        return A, B[:4].repeat(4, 1)[:15]
    if kind == "one row that counts":
        return A, torch.cat([torch.zeros(14, 6, dtype=torch.float64), B[:1]])
    if kind == "nearly dependent":
        return A, torch.cat([B[:, :5], B[:, :1] + 1e-14 * B[:, 5:]], dim=1)
    if kind == "tiny and huge rows":
        return A, B * torch.logspace(-30, 30, 15, dtype=torch.float64)[:, None]
    return 1e-200 * A, 1e-100 * B  # tiny


DEGENERATE = [
    "zero matrix", "zero A", "rank-deficient B", "rank-deficient A", "repeated rows", "one row that counts",
    "nearly dependent", "tiny and huge rows", "tiny",
]  # fmt: skip


@pytest.mark.parametrize("name", [Q, GATE, UP, DOWN])
@pytest.mark.parametrize("kind", DEGENERATE)
def test_degenerate_matrices_stay_what_they_are(kind: str, name: str) -> None:
    A, B = degenerate(kind)
    factors = LowRank(B.T.contiguous(), A.T.contiguous()) if name == DOWN else LowRank(A, B)
    layer = LayerFactors({name: factors}, {})
    after = to_pivoted(layer)
    found, matrix = after.low_rank[name], factors.B @ factors.A
    assert torch.isfinite(found.A).all() and torch.isfinite(found.B).all()
    largest = float(matrix.abs().max())
    check_same(layer, after)
    coefficients = found.A if name == DOWN else found.B
    assert float(coefficients.abs().max()) <= 10 * BOUND
    assert after.conditions[name] is None or after.conditions[name] >= 1
    assert len(pivots_of(found)) == 6
    # In the dtypes of checkpoints, whatever fits in them stays bounded by the rounding of six terms of two factors.
    if largest < 1e4:
        rounded = found._replace(A=found.A.bfloat16(), B=found.B.bfloat16())
        error = float((product(rounded) - product(found)).abs().max())
        assert error <= 6 * 2 * 2**-9 * max(1.0, float(coefficients.abs().max())) * max(largest, 1e-30)


@pytest.mark.parametrize(("outputs", "inputs"), [(6, 10), (10, 6), (8, 8), (1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("name", [Q, GATE, DOWN])
def test_full_rank_is_the_dense_matrix(name: str, outputs: int, inputs: int) -> None:
    rank = min(outputs, inputs)
    layer = LayerFactors({name: linear(outputs, inputs, rank)}, {})
    after = to_pivoted(layer)
    check_same(layer, after)
    found = after.low_rank[name]
    assert found.A.numel() + found.B.numel() == outputs * inputs


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "names", [(GATE, UP, DOWN), (UP,), (DOWN, GATE), (Q, K, V, OUT), (*MLP, Q, K, V, OUT), (GATE, K)], ids="+".join
)
@pytest.mark.parametrize("share", [False, True])
def test_a_decoder_layer_gives_the_outputs_it_gave(family: str, names: tuple[str, ...], share: bool) -> None:
    model = make_tiny(family)
    dense, prefix = model.model.layers[0], "model.layers.0."
    pair = LayerPair(dense, prefix)
    groups = [[name] for name in names]
    if share and {GATE, UP} <= set(names):
        groups = [[GATE, UP], *([name] for name in names if name not in (GATE, UP))]
    for group in groups:
        parts = [Linear(prefix + name, *dense.get_submodule(name).weight.shape) for name in group]
        target = parts[0] if len(parts) == 1 else Linear.sharing(parts, [1.0] * len(parts))
        u, s, vt = torch.linalg.svd(pair.weight(target), full_matrices=False)
        rank = 8
        pair.replace(target, vt[:rank], u[:, :rank] * s[:rank], torch.float32)
    before = copy.deepcopy(pair.compressed)
    conditions = pair.pivot(torch.float32)
    assert conditions.keys() == {prefix + group[0] for group in groups}
    assert pair.forms().keys() == conditions.keys()
    hidden = torch.randn(2, 7, 32)
    rotary = model.model.rotary_emb(hidden, torch.arange(7)[None])
    with torch.no_grad():
        wanted, found = (run_layer(layer, hidden, rotary) for layer in (before, pair.compressed))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for name in names:
        module = pair.compressed.get_submodule(name)
        assert isinstance(module, LowRankLinear) and not isinstance(module, nn.Linear)


def test_ranks_above_the_leaders_outputs_keep_two_factors() -> None:
    A = drawn(10, 12)
    layer = LayerFactors({K: LowRank(A, drawn(6, 10)), Q: LowRank(A, drawn(24, 10, seed=1))}, {Q: K})
    after = to_pivoted(layer)
    assert {one.form for one in after.low_rank.values()} == {Form.TWO} and not after.conditions
    check_same(layer, after)
