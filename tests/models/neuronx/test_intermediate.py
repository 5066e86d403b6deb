"""An MLP split over cores: the parts add up to the MLP, and store its pivots once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from draws import examples
from neuronmm.kernels.nki.forms import mlp_packings
from neuronmm.kernels.nki.layout import pack
from neuronmm.kernels.nki.low_rank_mlp import weights
from neuronmm.kernels.nki.low_rank_mlp_torch import low_rank_swiglu_mlp
from neuronmm.kernels.nki.objects import Options
from neuronmm.kernels.nki.problem import Pivots, Ranks
from neuronmm.models.neuronx.intermediate import MLP, Split, split

HIDDEN = 6
CORES, TILES = st.integers(1, 5), st.integers(1, 4)


@st.composite
def mlps(draw: st.DrawFn) -> tuple[Ranks, int]:
    """An MLP and a number of cores; each linear has pivots in any range, or two factors."""
    cores = draw(CORES)
    middle = cores * draw(st.integers(-(-2 // cores), 24))
    ranks = [draw(st.integers(1, middle - 1)) for _ in range(3)]
    gate, up = (draw(st.none() | st.integers(0, middle - rank)) for rank in ranks[:2])
    rows = (None if first is None else Pivots(first, rank) for first, rank in zip((gate, up), ranks, strict=False))
    return Ranks(*ranks, middle, *rows, draw(st.sampled_from([0, ranks[2]]))), cores


def expanded(ranks: Ranks, shared: bool) -> list[Tensor]:
    """Return random A and B of gate, up and down with two factors whose identity blocks fit the pivots."""
    random, factors = torch.Generator().manual_seed(0), []
    for index, (name, pivots) in enumerate(zip(MLP, ranks.pivots, strict=True)):
        rank, shape = getattr(ranks, name), (ranks.intermediate, HIDDEN)
        out, inputs = shape if index < 2 else shape[::-1]
        a = torch.randn(rank, inputs, generator=random) * inputs**-0.5
        b = torch.randn(out, rank, generator=random) * rank**-0.5
        if pivots:
            side = a[:, pivots.first : pivots.end] if name == "down" else b[pivots.first : pivots.end]
            side.copy_(torch.eye(rank))
        factors += [factors[0] if shared and name == "up" else a, b]
    return factors


def stored(mlp: Split, factors: list[Tensor], shared: bool) -> list[list[Tensor]]:
    """Return A and B of gate, up and down on every core."""
    cores: list[list[Tensor]] = [[] for _ in mlp.features]
    for index, name in enumerate(MLP):
        leader = "gate" if shared and name == "up" else name
        a = mlp.parts_of_a(leader, factors[2 * index])
        for core, *both in zip(cores, a, mlp.parts_of_b(name, factors[2 * index + 1], leader), strict=True):
            core += both
    return cores


@examples(40)
@given(drawn=mlps(), shared=st.booleans(), tile=TILES)
def test_the_cores_add_up_to_the_mlp(drawn: tuple[Ranks, int], shared: bool, tile: int) -> None:
    """Each core runs the kernel's torch reference on its packed factors, all of one packing."""
    ranks, cores = drawn
    if shared:
        ranks = replace(ranks, up=ranks.gate, up_pivots=None)
    factors = expanded(ranks, shared)
    mlp = split(ranks, cores, tile)
    packings = mlp_packings(HIDDEN, mlp.per_core, shared, 4)
    x = torch.randn(HIDDEN, 3, generator=torch.Generator().manual_seed(1))
    y = torch.zeros(HIDDEN, 3)
    for core in stored(mlp, factors, shared):
        packed = [pack(factor, packing=packing) for factor, packing in zip(core, packings, strict=True)]
        y += low_rank_swiglu_mlp(x, weights(packed, [p.plan() for p in packings], shared), Options())
    a, b, c, d, e, f = (factor.double() for factor in factors)
    act = silu(b @ (a @ x.double())) * (d @ (c @ x.double()))
    torch.testing.assert_close(y.double(), f @ (e @ act), rtol=1e-5, atol=1e-5)


@examples(40)
@given(drawn=mlps(), tile=TILES)
def test_a_core_stores_the_pivoted_number_of_weights(drawn: tuple[Ranks, int], tile: int) -> None:
    """That is r (in + out - p) with p pivots. At most a tile per core of each group is stored as ordinary features."""
    ranks, cores = drawn
    mlp, unit = split(ranks, cores, tile), cores * tile if cores > 1 else 1
    assert sorted(mlp.features.flatten().tolist()) == list(range(ranks.intermediate))
    ends = {end for pivots in ranks.pivots if pivots for end in (pivots.first, pivots.end)}
    factors = stored(mlp, expanded(ranks, False), False)
    for index, name in enumerate(MLP):
        rank, pivots, kept = getattr(ranks, name), ranks.pivots[index], mlp.per_core.pivots[index]
        number = kept.number if kept else 0
        for core in factors:
            sizes = HIDDEN + ranks.intermediate // cores - number
            assert sum(factor.numel() for factor in core[2 * index : 2 * index + 2]) == rank * sizes
        if pivots:
            groups = len([end for end in ends if pivots.first < end <= pivots.end])
            assert 0 <= rank - cores * number <= (unit - 1) * groups
            if all(end % unit == 0 for end in {*ends, ranks.intermediate}):
                assert rank == cores * number


@pytest.mark.parametrize(("cores", "per_core"), [
    (1, Ranks(12, 16, 8, 48, Pivots(30, 12), Pivots(20, 16), 8)),
    (2, Ranks(12, 16, 8, 24, Pivots(15, 6), Pivots(10, 8), 4)),
    (3, Ranks(12, 16, 8, 16, Pivots(10, 4), Pivots(7, 5), 2)),
    (16, Ranks(12, 16, 8, 3, None, Pivots(2, 1))),
])  # fmt: skip
def test_pivots_that_do_not_divide_are_ordinary_features(cores: int, per_core: Ranks) -> None:
    total = Ranks(12, 16, 8, 48, Pivots(30, 12), Pivots(20, 16), 8)
    assert split(total, cores, 1).per_core == per_core


def test_a_core_gets_full_tiles_of_pivots() -> None:
    """Of the 384 pivots of all three linears, 256 remain such and 128 are pivots of gate and up alone."""
    total = Ranks(1536, 1536, 1536, 8192, Pivots(5504, 1536), Pivots(5504, 1536), 1536)
    assert split(total, 2).per_core == Ranks(1536, 1536, 1536, 4096, Pivots(2816, 768), Pivots(2816, 768), 640)
    assert split(total, 16).per_core == Ranks(1536, 1536, 1536, 512)
