"""Ranks: uniform or from spectra; the budget, the floor, the tiles, and which linears share an A."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from draws import examples
from neuronmm.compression.ranks import (
    FIRST_MLP,
    FLOOR,
    MAX_RATIO,
    MAX_SCALE,
    MIN_RATIO,
    Linear,
    allocate,
    balance,
    energy,
    realised,
    relative,
    sharing_pays,
)
from neuronmm.models import UserError
from neuronmm.models.families import LAYERS

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
    assert {linear.tile("auto") for linear in linears} == {tile}
    assert balance(linears, ratio, "auto") == balance(linears, ratio, tile)
    assert abs(realised(linears, balance(linears, ratio, tile)) - ratio) <= 0.005


@pytest.mark.parametrize("ratio", [0.05, 0.15, 0.3])
@pytest.mark.parametrize("pivoted", [False, True])
def test_small_keys_and_values_do_not_narrow_the_tile_of_the_others(ratio: float, pivoted: bool) -> None:
    """Qwen2.5-1.5B: 256 keys of 1536 features beside an MLP of 8960."""
    shapes = {"q": (1536, 1536), "k": (256, 1536), "v": (256, 1536), "o": (1536, 1536)}
    shapes |= {"gate": (8960, 1536), "up": (8960, 1536), "down": (1536, 8960)}
    targets = [Linear(f"{i}.{name}", *shape, pivoted=pivoted) for i in range(28) for name, shape in shapes.items()]
    tiles = {linear.name: linear.tile("auto") for linear in targets}
    assert [tiles[f"0.{name}"] for name in shapes] == [64, 16, 16, 64, 128, 128, 128]
    losses = {linear.name: falling(linear, 1.0) for linear in targets}
    for ranks in (balance(targets, ratio, "auto"), allocate(targets, losses, alike(targets), ratio, "auto")):
        assert all(rank is None or rank % tiles[name] == 0 for name, rank in ranks.items())
        assert abs(realised(targets, ranks) - ratio) <= 0.005


@given(
    shapes=st.lists(st.tuples(st.integers(8, 300), st.integers(8, 300)), min_size=1, max_size=12),
    ratio=st.floats(MIN_RATIO, MAX_RATIO),
    align=st.sampled_from([1, 4, 16]),
    pivoted=st.booleans(),
)
@example(shapes=[(8, 8), (18, 142), (18, 145)], ratio=0.5, align=16, pivoted=False)  # nothing below any exact rank
@example(shapes=[(8, 8), (17, 142), (18, 145)], ratio=0.2, align=16, pivoted=True)
def test_every_rank_is_aligned_pays_and_is_next_to_the_exact_one(
    shapes: list[tuple[int, int]], ratio: float, align: int, pivoted: bool
) -> None:
    linears = [Linear(str(i), out, into, pivoted=pivoted) for i, (out, into) in enumerate(shapes)]
    exact_ranks = {linear.name: linear.rank_with((1 - ratio) * linear.dense) for linear in linears}
    try:
        ranks = balance(linears, ratio, align)
    except UserError:
        smallest = [max(align, int(exact // align) * align) for exact in exact_ranks.values()]
        # Refusal is right only if some matrix had no tile strictly under the limit on either side of its exact rank.
        assert any(rank + align >= linear.limit for rank, linear in zip(smallest, linears, strict=True))
        return
    step = max(align * (x.out_features + x.in_features) for x in linears)
    for linear in linears:
        rank, exact = ranks[linear.name], exact_ranks[linear.name]
        if rank is None:
            assert (exact // align + 1) * align >= linear.limit
        else:
            assert rank > 0 and rank % align == 0 and abs(rank - exact) <= align
            assert linear.parameters(rank) < linear.dense
    wanted = (1 - ratio) * sum(linear.dense for linear in linears)
    # A matrix too small for a tile below its exact rank keeps more whatever is chosen; the others can make up for it.
    forced = sum(linear.parameters(_least(linear, align)) - (1 - ratio) * linear.dense for linear in linears
                 if exact_ranks[linear.name] < align)  # fmt: skip
    assert -step <= sum(linear.parameters(ranks[linear.name]) for linear in linears) - wanted <= step + forced


def _least(linear: Linear, align: int) -> int | None:
    """The smallest aligned rank there is, if it saves parameters."""
    return align if align < linear.limit else None


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


def linears(layers: int, hidden: int, wide: int, pivoted: bool = False) -> list[Linear]:
    return [
        Linear(f"{index}.{name}", *shape, pivoted=pivoted)
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
    pivoted=st.booleans(),
)
def test_budget_floor_and_tiles_are_respected(
    layers: int, hidden: int, wide: int, ratio: float, align: int, powers: list[float], pivoted: bool
) -> None:
    targets = linears(layers, hidden, wide, pivoted)
    spectra = {linear.name: falling(linear, power) for linear, power in zip(targets, powers, strict=False)}
    fractions = {linear.name: power for linear, power in zip(targets, powers[::-1], strict=False)}
    ranks = allocate(targets, spectra, fractions, ratio, align)
    even = balance(targets, ratio, align)
    assert realised(targets, ranks) >= realised(targets, even) - 1e-12
    smallest = min((linear.out_features + linear.in_features) * align for linear in targets)
    widest = max(linear.dense - linear.parameters((math.ceil(linear.limit) - 1) // align * align) for linear in targets)
    slack = max(smallest, widest) / sum(linear.dense for linear in targets)
    full = all(rank is None for rank in ranks.values())
    assert full or realised(targets, ranks) <= realised(targets, even) + slack + 1e-12
    for linear in targets:
        rank = ranks[linear.name]
        if rank is not None:
            assert rank % align == 0 and align <= rank < linear.limit
            assert rank >= int(FLOOR * linear.rank_with((1 - ratio) * linear.dense) // align) * align


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


def test_a_matrix_of_rank_one_takes_no_ranks_from_the_others() -> None:
    """What rounding leaves of the other directions is no loss, however small their sum is."""
    targets = linears(3, 64, 128)
    spectra = {linear.name: falling(linear, 0.5) for linear in targets}
    one = targets[0].name
    spectra[one] = torch.cat([torch.ones(1), 1e-16 * torch.rand(len(spectra[one]) - 1).sort(descending=True)[0]])
    losses = {name: relative(values, energy(values)) for name, values in spectra.items()}
    assert energy(spectra[one]) == 0 and not losses[one].any()
    ranks = allocate(targets, losses, alike(targets), 0.3, 2)
    assert ranks[one] == min(rank for rank in ranks.values() if rank is not None)
    assert all(ranks[linear.name] != ranks[one] for linear in targets[2:])


def test_of_equal_spectra_the_linear_that_writes_more_of_the_stream_gets_more_ranks() -> None:
    targets = linears(2, 64, 128)
    spectra = {linear.name: falling(linear, 2.0) for linear in targets}  # steep enough that none is best dense
    fractions = {linear.name: 1.0 if linear.name.startswith("0.") else 0.5 for linear in targets}
    ranks = allocate(targets, spectra, fractions, 0.6, 1)
    for more, less in (
        (ranks[one.name], ranks[other.name]) for one, other in zip(targets[:2], targets[2:], strict=True)
    ):
        assert more is not None and less is not None
        # Gains per parameter are equal where fraction / rank^2 is.
        assert more == pytest.approx(2**0.5 * less, abs=2)


def test_the_losses_of_linears_that_share_an_a_add_up() -> None:
    """A rank of an A that two linears share reduces the loss of both."""
    pair = Linear.sharing([Linear("a", 64, 64), Linear("b", 64, 64)], [1.0, 1.0])
    alone = Linear("c", 64, 64)
    losses = {pair.name: 2 * falling(alone, 2.0), alone.name: falling(alone, 2.0)}
    ranks = allocate([pair, alone], losses, alike([pair, alone]), 0.5, 1)
    assert ranks[pair.name] is not None and ranks[alone.name] is not None
    # Gains per parameter: 2 / (3 x 64 rank^2) for the pair, 1 / (2 x 64 rank^2) for the one alone.
    assert ranks[pair.name] == pytest.approx((4 / 3) ** 0.5 * ranks[alone.name], abs=2)


def test_a_flat_spectrum_is_dense_or_at_its_floor() -> None:
    """Where each rank is worth as much as any other, pivoted ranks get cheaper, so one linear is kept whole."""
    targets = linears(2, 64, 64, pivoted=True)
    ranks = allocate(targets, {linear.name: falling(linear, 0.0) for linear in targets}, alike(targets), 0.3, 1)
    floor = int(FLOOR * targets[0].rank_with(0.7 * 64 * 64))
    kept = sorted(ranks.values(), key=lambda rank: rank or 64)
    assert kept[0] == floor and None in kept and sum(rank not in (None, floor) for rank in kept) <= 1


@pytest.mark.parametrize("ratio", [0.1, 0.2, 0.4, 0.6])
@pytest.mark.parametrize("shape", [(64, 64), (576, 1536), (3072, 576), (7, 300)])
def test_pivoted_factors_have_more_rank_at_equal_parameters(shape: tuple[int, int], ratio: float) -> None:
    two, pivoted = (Linear("a", *shape, pivoted=pivoted) for pivoted in (False, True))
    parameters = (1 - ratio) * two.dense
    ranks = two.rank_with(parameters), pivoted.rank_with(parameters)
    assert ranks[0] < ranks[1] < pivoted.limit == min(shape)
    for linear, rank in zip((two, pivoted), ranks, strict=True):
        below, above = linear.parameters(int(rank)), linear.parameters(int(rank) + 1)
        assert below <= parameters <= above
    assert pivoted.parameters(min(shape)) == pivoted.dense and pivoted.rank_with(2 * pivoted.dense) == min(shape)


def test_the_pivots_of_linears_that_share_an_a_are_outputs_of_the_leader() -> None:
    small, large = Linear("k", 16, 64, pivoted=True), Linear("q", 64, 64, pivoted=True)
    assert Linear.sharing([small, large], [1.0, 1.0]).limit == 16
    assert Linear.sharing([large, small], [1.0, 1.0]).limit == 64


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


@pytest.mark.parametrize(
    ("layers", "align", "kept"), [(12, 2, True), (2, 2, False), (12, 32, False)], ids=["small", "large", "coarse tile"]
)
@pytest.mark.parametrize("pivoted", [False, True], ids=["two", "pivoted"])
def test_the_mlp_of_the_first_layer_stays_dense_if_it_is_a_small_part_and_the_others_keep_their_floor(
    layers: int, align: int, kept: bool, pivoted: bool
) -> None:
    targets = [
        replace(one, name=f"{LAYERS}.{one.name.replace('.', '.mlp.')}") for one in linears(layers, 64, 128, pivoted)
    ]
    ranks = allocate(targets, {one.name: falling(one, 4.0) for one in targets}, alike(targets), 0.5, align)
    assert [ranks[one.name] is None for one in targets if one.name.startswith(FIRST_MLP)] == [kept, kept]
    assert all(ranks[one.name] is not None for one in targets[2:])
    assert realised(targets, ranks) >= realised(targets, balance(targets, 0.5, align)) - 1e-12
