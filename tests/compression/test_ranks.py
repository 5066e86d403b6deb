"""Ranks: uniform or from spectra; the budget, the floor, the tiles, and which linears share an A."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from draws import examples
from neuronmm.compression.ranks import (
    FLOOR,
    MAX_RATIO,
    MAX_SCALE,
    MIN_RATIO,
    Linear,
    allocate,
    auto_align,
    balance,
    energy,
    realised,
    relative,
    sharing_pays,
)
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
def test_every_rank_is_aligned_below_break_even_and_next_to_the_exact_one(
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
            assert linear.parameters(rank) < linear.dense
    wanted = (1 - ratio) * sum(linear.dense for linear in linears)
    # A matrix too small for a tile below its exact rank keeps more whatever is chosen; the others can make up for it.
    forced = sum(linear.parameters(_least(linear, align)) - (1 - ratio) * linear.dense for linear in linears
                 if linear.break_even * (1 - ratio) < align)  # fmt: skip
    assert -step <= sum(linear.parameters(ranks[linear.name]) for linear in linears) - wanted <= step + forced


def _least(linear: Linear, align: int) -> int | None:
    """Return the smallest aligned rank, if it saves parameters."""
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


def linears(layers: int, hidden: int, wide: int) -> list[Linear]:
    return [
        Linear(f"{index}.{name}", *shape)
        for index in range(layers)
        for name, shape in (("up", (wide, hidden)), ("down", (hidden, wide)))
    ]


def falling(linear: Linear, power: float) -> torch.Tensor:
    """Return a spectrum that falls off as a power of the rank."""
    return torch.arange(1, min(linear.out_features, linear.in_features) + 1, dtype=torch.float64) ** -power


def alike(targets: list[Linear]) -> dict[str, float]:
    """Return equal fractions of the stream for all linears."""
    return {linear.name: 0.1 for linear in targets}


@examples(60)
@given(
    layers=st.integers(2, 12),
    hidden=st.sampled_from([64, 96, 160]),
    wide=st.sampled_from([128, 256, 400]),
    ratio=st.floats(0.05, 0.6),
    align=st.sampled_from([1, 4, 8]),
    powers=st.lists(st.floats(0, 4), min_size=24, max_size=24),
)
def test_budget_floor_and_tiles_are_respected(
    layers: int, hidden: int, wide: int, ratio: float, align: int, powers: list[float]
) -> None:
    targets = linears(layers, hidden, wide)
    spectra = {linear.name: falling(linear, power) for linear, power in zip(targets, powers, strict=False)}
    fractions = {linear.name: power for linear, power in zip(targets, powers[::-1], strict=False)}
    ranks = allocate(targets, spectra, fractions, ratio, align)
    even = balance(targets, ratio, align)
    assert realised(targets, ranks) >= realised(targets, even) - 1e-12
    smallest = min((linear.out_features + linear.in_features) * align for linear in targets)
    widest = max(linear.dense - linear.parameters(int(linear.break_even) // align * align) for linear in targets)
    slack = max(smallest, widest) / sum(linear.dense for linear in targets)
    full = all(rank is None for rank in ranks.values())
    assert full or realised(targets, ranks) <= realised(targets, even) + slack + 1e-12
    for linear in targets:
        rank = ranks[linear.name]
        if rank is not None:
            assert rank % align == 0 and align <= rank < linear.break_even
            assert rank >= int(FLOOR * linear.break_even * (1 - ratio) // align) * align


def test_the_linear_with_the_flatter_spectrum_gets_more_ranks() -> None:
    targets = linears(2, 64, 128)
    steep, flat = targets[0].name, targets[2].name
    spectra = {linear.name: falling(linear, 1.0) for linear in targets}
    spectra |= {steep: falling(targets[0], 4.0), flat: falling(targets[2], 0.1)}
    ranks = allocate(targets, spectra, alike(targets), 0.4, 2)
    even = balance(targets, 0.4, 2)
    assert ranks[steep] is not None and even[steep] is not None and ranks[steep] < even[steep]
    assert ranks[flat] is None or ranks[flat] > even[flat]


def test_a_massive_activation_takes_no_rank_from_the_other_tokens() -> None:
    """A direction with a million times the energy of the others, which every rank keeps, changes nothing."""
    targets = linears(3, 64, 128)
    spectra = {linear.name: falling(linear, 0.5 + 0.3 * number) for number, linear in enumerate(targets)}
    massive = {name: torch.cat([1e6 * values[:1], values[1:]]) for name, values in spectra.items() if "down" in name}

    def ranks(spectra: dict[str, torch.Tensor]) -> dict[str, int | None]:
        losses = {name: relative(values, energy(values)) for name, values in spectra.items()}
        return allocate(targets, losses, alike(targets), 0.3, 2)

    assert ranks({**spectra, **massive}) == ranks(spectra)


def test_of_equal_spectra_the_linear_that_writes_more_of_the_stream_gets_more_ranks() -> None:
    targets = linears(2, 64, 128)
    spectra = {linear.name: falling(linear, 1.0) for linear in targets}
    fractions = {linear.name: 1.0 if linear.name.startswith("0.") else 0.5 for linear in targets}
    first, second = (
        [rank if (rank := ranks[linear.name]) is not None else int(linear.break_even) for linear in group]
        for ranks in (allocate(targets, spectra, fractions, 0.4, 1),)
        for group in (targets[:2], targets[2:])
    )
    for more, less in zip(first, second, strict=True):
        # Gains per parameter are equal where fraction / rank is equal.
        assert more == pytest.approx(2 * less, abs=2)


def test_the_losses_of_linears_that_share_an_a_add_up() -> None:
    """A rank of an A that two linears share reduces the loss of both."""
    pair = Linear.sharing([Linear("a", 64, 64), Linear("b", 64, 64)], [1.0, 1.0])
    alone = Linear("c", 64, 64)
    losses = {pair.name: 2 * falling(alone, 1.0), alone.name: falling(alone, 1.0)}
    ranks = allocate([pair, alone], losses, alike([pair, alone]), 0.4, 1)
    assert ranks[pair.name] is not None and ranks[alone.name] is not None
    # Gains per parameter: 2 / (3 x 64 rank) for the pair, 1 / (2 x 64 rank) for the one alone.
    assert ranks[pair.name] == pytest.approx(4 / 3 * ranks[alone.name], abs=2)


@pytest.mark.parametrize("same", [True, False])
def test_an_a_is_shared_where_the_inputs_that_matter_are_the_same(same: bool) -> None:
    """Two weights that read one subspace share an A at no loss; two that read different ones do not."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(32, 32, generator=generator)).Q
    spaces = (basis[:, :12], basis[:, :12] if same else basis[:, 12:24])
    weights = [torch.randn(48, 12, generator=generator) @ space.T for space in spaces]
    joint = Linear.sharing([Linear("a", 48, 32), Linear("b", 48, 32)], [1.0, 1.0])
    apart = {
        linear.name: torch.linalg.svdvals(weight.double()).square()
        for linear, weight in zip(joint.members, weights, strict=True)
    }
    together = torch.linalg.svdvals(torch.cat(weights).double()).square()
    assert sharing_pays(joint, {"a": 10, "b": 10}, apart, together) is same
    assert not sharing_pays(joint, {"a": None, "b": None}, apart, together)


@given(energies=st.lists(st.floats(0, 1e12), min_size=1, max_size=4))
def test_linears_that_share_an_a_are_scaled_to_the_highest_energy_and_dead_ones_stay_dead(
    energies: list[float],
) -> None:
    members = [Linear(str(number), 3, 5) for number in range(len(energies))]
    joint = Linear.sharing(members, energies)
    assert [part for part, _ in joint.scaled_parts] == members
    for energy_, scale in zip(energies, joint.scales, strict=True):
        assert 1 <= scale <= MAX_SCALE * (1 + 1e-12)
        if energy_ * MAX_SCALE**2 > max(energies):
            assert energy_ * scale**2 == pytest.approx(max(energies))
    assert Linear("alone", 3, 5).scaled_parts == [(Linear("alone", 3, 5), 1.0)]
