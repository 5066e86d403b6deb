"""Which rank each linear gets when the budget is one for the whole model, and which linears share an A.

Greedy on the whitened spectra: the next tile of ranks goes where it takes most off the loss per parameter. A floor
keeps every linear at a share of its uniform rank, because a spectrum measured on one text says little about another.

The loss of a linear is relative to its energy without the first direction, which no rank drops: that of massive
activations holds up to all of a down projection's energy, and beside it the other tokens' loss would look like nothing.
It counts by what the linear's half of its layer writes beside the residual stream: the first MLP makes the stream, one
in the middle adds a few hundredths to its energy. Linears that share an A lose the sum of what each of them loses.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from torch import Tensor

from neuronmm.compression.ranks import Linear, balance

FLOOR = 0.5
"""Least share of a linear's uniform rank that it keeps."""


def energy(spectrum: Tensor) -> float:
    """The energy of a linear's outputs without the first direction, from its whitened eigenvalues, largest first."""
    return float(spectrum[1:].sum())


def relative(spectrum: Tensor, whole: float) -> Tensor:
    """What each rank takes off the loss, as a share of the energy ``whole``; a dead linear loses nothing."""
    return spectrum / max(whole, 1e-300)


def allocate(
    linears: Sequence[Linear], losses: Mapping[str, Tensor], shares: Mapping[str, float], ratio: float, align: int
) -> dict[str, int | None]:
    """The rank of each linear, a multiple of ``align``, or None where it stays dense.

    Args:
        linears: the targeted linears, in the order of the model's layers.
        losses: what each rank takes off each one's relative loss, largest first, by name.
        shares: what each one's half of its layer writes, as a share of the residual stream's energy, by name.
        ratio: share of their parameters to remove.
        align: the tile, in ranks.

    Raises:
        UserError: as :func:`neuronmm.compression.ranks.balance`.
    """
    even = balance(linears, ratio, align)
    budget = sum(linear.kept(even[linear.name]) for linear in linears)
    ranks: dict[str, int | None] = {}
    waiting: list[tuple[float, int, int | None]] = []

    def offer(number: int) -> None:
        """Put the linear's next step up on the heap: one tile more, or dense where that passes break-even."""
        linear = linears[number]
        rank = ranks[linear.name]
        if rank is None:
            return
        step = rank + align if rank + align < linear.break_even else None
        cost = linear.kept(step) - linear.kept(rank)
        gain = shares[linear.name] * float(losses[linear.name][rank:step].sum())
        heapq.heappush(waiting, (-gain / cost, number, step))

    for number, linear in enumerate(linears):
        least = int(FLOOR * linear.break_even * (1 - ratio) // align) * align
        ranks[linear.name] = max(least, align) if align < linear.break_even else None
        budget -= linear.kept(ranks[linear.name])
        offer(number)
    while waiting:
        _, number, step = heapq.heappop(waiting)
        linear = linears[number]
        cost = linear.kept(step) - linear.kept(ranks[linear.name])
        if cost <= budget:  # else this one stays, and cheaper steps of others may still fit
            ranks[linear.name], budget = step, budget - cost
            offer(number)
    return ranks


def sharing_pays(joint: Linear, ranks: Mapping[str, int | None], apart: Mapping[str, Tensor], together: Tensor) -> bool:
    """Whether linears of one input lose less with one A than with their own, at equal parameters.

    Args:
        joint: the linears as one.
        ranks: what each one gets with an A of its own, by name.
        apart: what each rank takes off each one's relative loss then, largest first, by name.
        together: what each rank takes off the sum of their relative losses with one A.
    """
    rank = sum(linear.kept(ranks[linear.name]) for linear in joint.members) // joint.kept(1)
    factorised = [linear.name for linear in joint.members if ranks[linear.name] is not None]
    return float(together[rank:].sum()) < sum(float(apart[name][ranks[name] :].sum()) for name in factorised)
