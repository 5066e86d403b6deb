"""Aligned ranks that hit the asked ratio."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from neuronmm.compression.ranks import MAX_RATIO, MIN_RATIO, Linear, auto_align, balance, realised
from neuronmm.models import UserError

# hidden, intermediate, layers of published models, and the alignment auto has to choose for their MLPs
PUBLISHED = {
    "SmolLM2-135M": (576, 1536, 30, 32),
    "Llama-3.2-1B": (2048, 8192, 16, 128),
    "Llama-3.2-3B": (3072, 8192, 28, 128),
    "Qwen3-1.7B": (2048, 6144, 28, 128),
    "Qwen3-4B": (2560, 9728, 36, 128),
    "Llama-3.1-8B": (4096, 14336, 32, 128),
}


def mlps(hidden: int, intermediate: int, layers: int) -> list[Linear]:
    shapes = (("gate", intermediate, hidden), ("up", intermediate, hidden), ("down", hidden, intermediate))
    return [Linear(f"{i}.{name}", out, into) for i in range(layers) for name, out, into in shapes]


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
def test_published_shapes_land_within_half_a_point(model: str, ratio: float) -> None:
    *shape, tile = PUBLISHED[model]
    linears = mlps(*shape)
    assert auto_align(linears) == tile
    assert abs(realised(linears, balance(linears, ratio, tile)) - ratio) <= 0.005


@given(
    shapes=st.lists(st.tuples(st.integers(8, 300), st.integers(8, 300)), min_size=1, max_size=12),
    ratio=st.floats(MIN_RATIO, MAX_RATIO),
    align=st.sampled_from([1, 4, 16]),
)
@example(shapes=[(8, 8), (18, 142), (18, 145)], ratio=0.5, align=16)  # nothing below any exact rank
def test_every_rank_is_aligned_pays_and_is_next_to_the_exact_one(
    shapes: list[tuple[int, int]], ratio: float, align: int
) -> None:
    linears = [Linear(str(i), out, into) for i, (out, into) in enumerate(shapes)]
    try:
        ranks = balance(linears, ratio, align)
    except UserError:
        smallest = [max(align, int(x.break_even * (1 - ratio) // align) * align) for x in linears]
        # Refusal is right only if some matrix had no tile strictly under break-even on either side of its exact rank.
        assert any(rank + align >= linear.break_even for rank, linear in zip(smallest, linears, strict=True))
        return
    step = max(align * (x.out_features + x.in_features) for x in linears)
    for linear in linears:
        rank = ranks[linear.name]
        exact = linear.break_even * (1 - ratio)
        if rank is None:
            assert (exact // align + 1) * align >= linear.break_even
        else:
            assert rank > 0 and rank % align == 0 and abs(rank - exact) <= align
            assert linear.kept(rank) < linear.dense
    wanted = (1 - ratio) * sum(linear.dense for linear in linears)
    # A matrix too small for a tile below its exact rank keeps more whatever is chosen; the others can make up for it.
    forced = sum(linear.kept(_least(linear, align)) - (1 - ratio) * linear.dense for linear in linears
                 if linear.break_even * (1 - ratio) < align)  # fmt: skip
    assert -step <= sum(linear.kept(ranks[linear.name]) for linear in linears) - wanted <= step + forced


def _least(linear: Linear, align: int) -> int | None:
    """The smallest aligned rank there is, if it saves parameters."""
    return align if align < linear.break_even else None


def test_the_low_and_the_high_tile_alternate_over_the_depth() -> None:
    ranks = list(balance(mlps(2048, 8192, 16), 0.2, 128).values())
    assert set(ranks) == {1280, 1408}
    halves = [ranks[: len(ranks) // 2].count(1408), ranks[len(ranks) // 2 :].count(1408)]
    assert abs(halves[0] - halves[1]) <= 1


@pytest.mark.parametrize("ratio", [0.0, 0.049, 0.61, 1.0, -0.2, float("nan")])
def test_a_ratio_out_of_range_is_refused(ratio: float) -> None:
    with pytest.raises(UserError, match=r"between 0\.05 and 0\.6"):
        balance(mlps(64, 128, 1), ratio, 4)


def test_a_tile_wider_than_every_matrix_is_refused() -> None:
    with pytest.raises(UserError, match="use a smaller tile"):
        balance(mlps(64, 128, 1), 0.2, 128)
    with pytest.raises(UserError, match="positive"):
        balance(mlps(64, 128, 1), 0.2, 0)
