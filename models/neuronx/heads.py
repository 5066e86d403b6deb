"""Which attention heads a rank computes, when heads do not divide evenly over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadPlan:
    """The heads of every rank, by their index in the checkpoint; None is a head of zeros.

    A rank's query heads share its key heads evenly: query slot i uses key slot ``i // (queries / keys)``.
    """

    queries: tuple[tuple[int | None, ...], ...]
    keys: tuple[tuple[int | None, ...], ...]

    @property
    def queries_per_rank(self) -> int:
        return len(self.queries[0])

    @property
    def keys_per_rank(self) -> int:
        return len(self.keys[0])


def distribute(heads: int, kv_heads: int, ranks: int) -> HeadPlan:
    """Give each rank a run of query heads and the key heads they need, as few heads in all as the runs allow.

    A rank with ``n`` query slots has key slots for runs of ``gcd(n, group)`` of them, ``group`` being the query heads
    of one key head: such a run never crosses a group. Slots beyond the last head are zeros. 9 heads, 3 key heads and
    2 ranks give 6 query and 2 key slots a rank, not 5 and 5.
    """
    group = heads // kv_heads
    least = -(-heads // ranks)

    def run(slots: int) -> int:
        return gcd(slots, group)

    slots = min(range(least, least + group), key=lambda n: (n + 2 * n // run(n), n))
    step = run(slots)
    queries, keys = [], []
    for rank in range(ranks):
        mine = range(rank * slots, (rank + 1) * slots)
        queries.append(tuple(head if head < heads else None for head in mine))
        keys.append(tuple(head // group if head < heads else None for head in mine[::step]))
    return HeadPlan(tuple(queries), tuple(keys))


def take_heads(tensor: Tensor, heads: tuple[int | None, ...], size: int, dim: int) -> Tensor:
    """The slices of ``tensor`` that belong to ``heads``, ``size`` wide each, along ``dim``; zeros for None."""
    parts = [
        torch.zeros_like(tensor.narrow(dim, 0, size)) if head is None else tensor.narrow(dim, head * size, size)
        for head in heads
    ]
    return torch.cat(parts, dim)
