"""Tile-aligned ranks that together meet the requested ratio: uniform or global.

The paper's uniform rank (arXiv 2510.25977 v4, Eq. 5) is ``r = floor(K N (1 - ratio) / ((K + N) b) + 0.5) b``. The same
aligned rank in every layer cannot meet an arbitrary ratio: Llama-3.2-1B at 0.05 ends at 6.25 %. :func:`balance`
therefore lets each matrix take the aligned rank below or above its exact rank, or stay dense if that rank passes
break-even. Matrix by matrix, it makes the choice that keeps the running total nearest to the requested fraction, so low
and high ranks alternate over the depth.

The global allocation, :func:`allocate`, divides the parameters over all linears. It is greedy on the whitened
spectra: the next tile of ranks goes to the linear whose loss it reduces most per parameter. Each further rank of
pivoted factors costs less, so there a step may be several tiles, up to dense. A floor keeps every linear at a fraction
of its uniform rank, because a spectrum measured on one text predicts little about another.

The MLP of the first layer stays dense, if it is a tenth of the parameters at most and the others keep their floor. Its
inputs are tokens rather than text, and no calibration text holds the whole vocabulary. From the tokens that begin a
text, the first layers make massive activations, on which all later tokens put their attention (arXiv 2402.17762).
Without them the rest of the text costs 1 to 2 nats per token more: Qwen2.5-Coder-1.5B, with this MLP at two fifths of
its rank, lost them after 12 % of the beginnings of WikiText-2, and after 42 % of those of Python sources; with it
dense, after none of 600.

With the method ``fisher`` a loss is a KL divergence, and all of them count alike. With the others, the loss of a
linear is relative to its energy without the first direction. No rank drops that direction, but massive
activations can put nearly all the energy of a down projection into it, and the loss of the other tokens would look
negligible beside it. The loss is weighted by how much the attention or MLP block of the linear writes to the residual
stream: the first MLP creates the stream, one in the middle adds a few percent to its energy. The loss of linears that
share an A is the sum of their losses.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS

if TYPE_CHECKING:
    from torch import Tensor

MIN_RATIO, MAX_RATIO = 0.05, 0.6
Align = Literal["auto"] | int
"""The tile of all ranks, or a tile for each linear (:meth:`Linear.tile`)."""

TILE = 128
"""Width of Trainium's tensor engine, the alignment of ranks if the matrices are large enough."""

FLOOR = 0.5
"""The global allocation leaves every linear at least this fraction of its uniform rank."""

FIRST_MLP = f"{LAYERS}.0.mlp."
"""The prefix of the names of the linears that the global allocation leaves dense."""

FIRST_SHARE = 0.1
"""The largest share of the parameters that these linears may have, so that the others do not give up too much."""

_NOISE = 1e-12
"""Eigenvalues below this fraction of the largest one are rounding errors."""

MAX_SCALE = 1e3
"""Largest scale of a linear relative to those that share its A. A linear without energy has no weight in A."""


@dataclass(frozen=True)
class Linear:
    """A targeted linear: its full name and its weight's shape [out, in].

    With ``members`` it represents several linears with one input and a shared A, the leader first. Its name is the
    leader's name, its weight is the concatenation of their weights, each multiplied by its entry of ``scales``.

    ``pivoted`` factors of rank r have r (in + out - r) parameters, two plain factors r (in + out).
    """

    name: str
    out_features: int
    in_features: int
    members: tuple[Linear, ...] = ()
    scales: tuple[float, ...] = ()
    pivoted: bool = False

    @classmethod
    def sharing(cls, members: Sequence[Linear], energies: Sequence[float]) -> Linear:
        """Combine linears with one input into one, each scaled to the largest of their ``energies``.

        The loss of each linear then counts relative to its own energy. Without scales the linear with the most energy
        would determine A: queries have up to hundreds of times the energy of values.
        """
        leader, most = members[0], max(energies)
        scales = [(most / max(energy, most / MAX_SCALE**2)) ** 0.5 if most > 0 else 1.0 for energy in energies]
        out_features = sum(member.out_features for member in members)
        return cls(leader.name, out_features, leader.in_features, tuple(members), tuple(scales), leader.pivoted)

    @property
    def parts(self) -> tuple[Linear, ...]:
        """The linears of the model that this one represents."""
        return self.members or (self,)

    @property
    def scaled_parts(self) -> list[tuple[Linear, float]]:
        """:attr:`parts`, each with the scale of its weight during the factorisation."""
        return list(zip(self.parts, self.scales or (1.0,), strict=True))

    @property
    def dense(self) -> int:
        """Parameters of the dense weight, without the bias, which both forms keep."""
        return self.out_features * self.in_features

    @property
    def limit(self) -> float:
        """The rank from which the linear stays dense: it has no fewer parameters, or no pivots, at a higher rank.

        For two factors it is the break-even rank. Pivots of linears that share an A are outputs of the leader.
        """
        if self.pivoted:
            return min(self.parts[0].out_features, self.in_features)
        return self.dense / (self.out_features + self.in_features)

    def parameters(self, rank: int | None) -> int:
        """Return the parameters at ``rank``; None means dense."""
        if rank is None:
            return self.dense
        return rank * (self.out_features + self.in_features - (rank if self.pivoted else 0))

    def tile(self, align: Align) -> int:
        """Return what its ranks are multiples of.

        With ``auto`` it is the widest power of two, at most 128, that leaves eight ranks of two factors to choose from:
        128 for the MLP of every published Llama and Qwen from 1B up; keys and values may have less.
        """
        if align != "auto":
            return align
        widest, tile = self.dense / (self.out_features + self.in_features) / 8, TILE
        while tile > 1 and tile > widest:
            tile //= 2
        return tile

    def rank_with(self, parameters: float) -> float:
        """Return the rank at which the factors have ``parameters``, at most those of the dense weight."""
        features = self.out_features + self.in_features
        if not self.pivoted:
            return parameters / features
        return (features - (features**2 - 4 * min(parameters, self.dense)) ** 0.5) / 2


def balance(linears: Sequence[Linear], ratio: float, align: Align) -> dict[str, int | None]:
    """Return the rank of each linear, a multiple of its tile, or None if it stays dense.

    Args:
        linears: the targeted linears, in the order of the model's layers.
        ratio: fraction of their parameters to remove, 0.05 to 0.6.
        align: the tile, in ranks, or ``auto``.

    Raises:
        UserError: the ratio is out of range, or the tile is so wide that no matrix can be compressed.
    """
    if not MIN_RATIO <= ratio <= MAX_RATIO:
        raise UserError(
            f"--ratio {ratio:g}: must lie between {MIN_RATIO} and {MAX_RATIO} (fraction of parameters removed)"
        )
    if align != "auto" and align < 1:
        raise UserError(f"--align {align}: must be a positive number of ranks, or auto")
    ranks: dict[str, int | None] = {}
    target = total = 0.0
    for linear in linears:
        target += (1 - ratio) * linear.dense
        choices = _choices(linear, ratio, linear.tile(align))
        rank = min(choices, key=lambda choice: abs(total + linear.parameters(choice) - target))
        ranks[linear.name] = rank
        total += linear.parameters(rank)
    if all(rank is None for rank in ranks.values()):
        raise UserError(
            f"--align {align}: at ratio {ratio:g} no aligned rank is smaller than dense; use a smaller tile"
        )
    return ranks


def _choices(linear: Linear, ratio: float, align: int) -> list[int | None]:
    """Return the aligned ranks on both sides of the exact rank; None (dense) for a rank at or past the limit."""
    below = int(linear.rank_with((1 - ratio) * linear.dense) // align) * align
    ranks = [rank for rank in (below, below + align) if rank > 0]
    return [rank if rank < linear.limit else None for rank in ranks]


def realised(linears: Sequence[Linear], ranks: dict[str, int | None]) -> float:
    """Return the fraction of the linears' parameters that ``ranks`` removes, 0 to 1."""
    parameters = sum(linear.parameters(ranks[linear.name]) for linear in linears)
    return 1 - parameters / sum(linear.dense for linear in linears)


def energy(spectrum: Tensor) -> float:
    """Return the energy of a linear's outputs without the first direction; ``spectrum`` is sorted, largest first.

    What rounding leaves of a matrix of rank 1 is no energy: as the whole of a loss it would draw the budget.
    """
    return float(spectrum[1:][spectrum[1:] > _NOISE * spectrum[0]].sum())


def relative(spectrum: Tensor, total: float) -> Tensor:
    """Return the loss reduction of each rank as a fraction of the energy ``total``; 0 without energy."""
    return spectrum / total if total > 0 else 0 * spectrum


def allocate(
    linears: Sequence[Linear], losses: Mapping[str, Tensor], fractions: Mapping[str, float], ratio: float, align: Align
) -> dict[str, int | None]:
    """Return the rank of each linear, a multiple of its tile, or None if it stays dense.

    Args:
        linears: the targeted linears, in the order of the model's layers.
        losses: by name, the reduction of the relative loss by each rank, largest first.
        fractions: by name, the energy that the linear's block writes, as a fraction of the residual stream's energy.
        ratio: fraction of their parameters to remove.
        align: the tile, in ranks, or ``auto``.

    Raises:
        UserError: as :func:`balance`.
    """
    uniform = balance(linears, ratio, align)
    budget = sum(linear.parameters(uniform[linear.name]) for linear in linears)
    ranks = _least(linears, ratio, align, budget)
    budget -= sum(linear.parameters(ranks[linear.name]) for linear in linears)
    steps: list[tuple[float, int, int | None]] = []
    choices = [_Steps.of(linear, losses[linear.name], align) for linear in linears]

    def offer(number: int) -> None:
        """Push the linear's best affordable step onto the heap, by gain per parameter."""
        linear, rank = linears[number], ranks[linears[number].name]
        best = None if rank is None else choices[number].best(rank, linear.parameters(rank), budget)
        if best is not None:
            rate, step = best
            heapq.heappush(steps, (-fractions[linear.name] * rate, number, step))

    for number in range(len(linears)):
        offer(number)
    while steps:
        _, number, step = heapq.heappop(steps)
        linear = linears[number]
        cost = linear.parameters(step) - linear.parameters(ranks[linear.name])
        if cost <= budget:  # otherwise a smaller step may still fit
            ranks[linear.name], budget = step, budget - cost
        offer(number)
    return ranks


@dataclass(frozen=True)
class _Steps:
    """The ranks of one linear, the last of which is dense: their parameters, and the loss that they take away."""

    ranks: list[int | None]
    parameters: Tensor
    gained: Tensor
    loss: Tensor
    nested: bool
    """Whether only the next rank is offered: two factors gain less with every further rank."""

    @classmethod
    def of(cls, linear: Linear, loss: Tensor, align: Align) -> _Steps:
        tile = linear.tile(align)
        ranks = [*range(tile, math.ceil(linear.limit), tile), None]
        sizes = loss.double().new_tensor([linear.parameters(rank) for rank in ranks])
        gained = loss.cumsum(0)[[(rank or len(loss)) - 1 for rank in ranks]]
        return cls(ranks, sizes, gained, loss, not linear.pivoted)

    def best(self, rank: int, size: int, budget: int) -> tuple[float, int | None] | None:
        """Return the gain per parameter and the rank of the best step from ``rank`` that the ``budget`` allows."""
        first = self.ranks.index(rank) + 1
        more = slice(first, first + 1 if self.nested else None)
        costs = self.parameters[more] - size
        rates = (self.gained[more] - self.loss[:rank].sum()).double() / costs
        rates[costs > budget] = -math.inf
        best = int(rates.argmax())
        return None if costs[best] > budget else (float(rates[best]), self.ranks[first + best])


def _least(linears: Sequence[Linear], ratio: float, align: Align, budget: int) -> dict[str, int | None]:
    """Return the ranks that the allocation begins with: the floors, and the first MLP dense if ``budget`` parameters
    are enough for that.
    """
    floors: dict[str, int | None] = {}
    for linear in linears:
        tile = linear.tile(align)
        floor = int(FLOOR * linear.rank_with((1 - ratio) * linear.dense) // tile) * tile
        floors[linear.name] = max(floor, tile) if tile < linear.limit else None
    first = [linear for linear in linears if linear.name.startswith(FIRST_MLP)]
    kept = floors | {linear.name: None for linear in first}
    small = sum(linear.dense for linear in first) <= FIRST_SHARE * sum(linear.dense for linear in linears)
    fits = sum(linear.parameters(kept[linear.name]) for linear in linears) <= budget
    return kept if small and fits else floors


def sharing_pays(joint: Linear, ranks: Mapping[str, int | None], apart: Mapping[str, Tensor], together: Tensor) -> bool:
    """Return whether linears with one input lose less with a shared A than with their own, at equal parameters.

    Args:
        joint: the linears as one.
        ranks: by name, the rank of each linear with its own A.
        apart: by name, the reduction of each linear's relative loss by each rank of its own A, largest first.
        together: the reduction of the sum of their relative losses by each rank of a shared A.
    """
    rank = int(joint.rank_with(sum(linear.parameters(ranks[linear.name]) for linear in joint.members)))
    factorised = [linear.name for linear in joint.members if ranks[linear.name] is not None]
    return float(together[rank:].sum()) < sum(float(apart[name][ranks[name] :].sum()) for name in factorised)
