"""Allocate one parameter budget over the linears of the whole model, and decide which linears share an A.

The allocation is greedy on the whitened spectra: the next tile of ranks goes to the linear whose loss it reduces most
per parameter. A floor keeps every linear at a fraction of its uniform rank, because a spectrum measured on one text
predicts little about another.

The loss of a linear is relative to its energy without the first direction. No rank drops that direction, but massive
activations can put nearly all the energy of a down projection into it, and the loss of the other tokens would look
negligible beside it. The loss is weighted by how much the attention or MLP block of the linear writes to the residual
stream: the first MLP creates the stream, one in the middle adds a few percent to its energy. The loss of linears that
share an A is the sum of their losses.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from torch import Tensor

from neuronmm.compression.ranks import Linear, balance

FLOOR = 0.5
"""Fraction of its uniform rank that every linear keeps at least."""


def energy(spectrum: Tensor) -> float:
    """Return the energy of a linear's outputs without the first direction; ``spectrum`` is sorted, largest first."""
    return float(spectrum[1:].sum())


def relative(spectrum: Tensor, whole: float) -> Tensor:
    """Return the loss reduction of each rank as a fraction of the energy ``whole``; a dead linear has none."""
    return spectrum / max(whole, 1e-300)


def allocate(
    linears: Sequence[Linear], losses: Mapping[str, Tensor], shares: Mapping[str, float], ratio: float, align: int
) -> dict[str, int | None]:
    """Return the rank of each linear, a multiple of ``align``, or None if it stays dense.

    Args:
        linears: the targeted linears, in the order of the model's layers.
        losses: by name, the reduction of the relative loss by each rank, largest first.
        shares: by name, the energy that the linear's block writes, as a fraction of the residual stream's energy.
        ratio: fraction of their parameters to remove.
        align: the tile, in ranks.

    Raises:
        UserError: as :func:`neuronmm.compression.ranks.balance`.
    """
    even = balance(linears, ratio, align)
    budget = sum(linear.kept(even[linear.name]) for linear in linears)
    ranks: dict[str, int | None] = {}
    waiting: list[tuple[float, int, int | None]] = []

    def offer(number: int) -> None:
        """Push the linear's next step onto the heap: one more tile, or dense if that would pass break-even."""
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
        if cost <= budget:  # otherwise this linear is done, and cheaper steps of others may still fit
            ranks[linear.name], budget = step, budget - cost
            offer(number)
    return ranks


def sharing_pays(joint: Linear, ranks: Mapping[str, int | None], apart: Mapping[str, Tensor], together: Tensor) -> bool:
    """Whether linears with one input lose less with a shared A than with their own, at equal parameters.

    Args:
        joint: the linears as one.
        ranks: by name, the rank of each linear with its own A.
        apart: by name, the reduction of each linear's relative loss by each rank of its own A, largest first.
        together: the reduction of the sum of their relative losses by each rank of a shared A.
    """
    rank = sum(linear.kept(ranks[linear.name]) for linear in joint.members) // joint.kept(1)
    factorised = [linear.name for linear in joint.members if ranks[linear.name] is not None]
    return float(together[rank:].sum()) < sum(float(apart[name][ranks[name] :].sum()) for name in factorised)
