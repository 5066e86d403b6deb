"""Which rank each linear gets when the budget is one for the whole model, and which linears share an A.

Greedy on the whitened spectra: the next tile of ranks goes where it takes most off the loss per parameter. A floor
keeps every linear at a share of its uniform rank, because a spectrum measured on one text says little about another.

The loss of a linear is relative to its energy without the first direction, which no rank drops: that of massive
activations holds up to all of a down projection's energy, and beside it the other tokens' loss would look like nothing.
It counts by what the linear's half of its layer writes beside the residual stream: the first MLP makes the stream, one
in the middle adds a few hundredths to its energy. The loss of linears that share an A is the loss of each of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from torch import Tensor

from neuronmm.compression.ranks import Linear, balance

FLOOR = 0.5
"""Least share of a linear's uniform rank that it keeps."""


def allocate(
    linears: Sequence[Linear], spectra: Mapping[str, Tensor], shares: Mapping[str, float], ratio: float, align: int
) -> dict[str, int | None]:
    """The rank of each linear, a multiple of ``align``, or None where it stays dense.

    Args:
        linears: the targeted linears, in the order of the model's layers.
        spectra: each one's whitened eigenvalues, largest first, by name.
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
        values = spectra[linear.name]
        lost = values[rank:step].sum() / values[1:].sum().clamp(min=1e-300)
        gain = shares[linear.name] * len(linear.parts) * float(lost)
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


def sharing_pays(apart: Sequence[Linear], spectra: Mapping[str, Tensor], together: Tensor, ratio: float) -> bool:
    """Whether linears of one input lose less with one A than with their own, at equal parameters.

    Args:
        apart: the linears.
        spectra: each one's whitened eigenvalues, largest first, by name.
        together: those of their weights on top of each other.
        ratio: share of their parameters to remove.
    """
    joint = Linear.sharing(apart)
    lost = sum(float(spectra[linear.name][int(linear.break_even * (1 - ratio)) :].sum()) for linear in apart)
    return float(together[int(joint.break_even * (1 - ratio)) :].sum()) < lost
