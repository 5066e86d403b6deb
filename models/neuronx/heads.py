"""Distributes attention heads over NeuronCores, also where they do not divide evenly."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadPlan:
    """The heads of every core, by their index in the checkpoint; None is a head of zeros.

    A core's query heads share its key heads evenly: query slot i uses key slot ``i // (queries / keys)``.
    """

    queries: tuple[tuple[int | None, ...], ...]
    keys: tuple[tuple[int | None, ...], ...]

    @property
    def queries_per_core(self) -> int:
        return len(self.queries[0])

    @property
    def keys_per_core(self) -> int:
        return len(self.keys[0])


def distribute(heads: int, kv_heads: int, cores: int) -> HeadPlan:
    """Assign each core consecutive query heads and the key heads that they need, with the fewest slots in total.

    ``group`` is the number of query heads per key head. A core with ``n`` query slots has one key slot per
    ``gcd(n, group)`` query slots, because such a run never crosses a group. Slots beyond the last head are zeros.
    9 heads, 3 key heads and 2 cores give 6 query and 2 key slots per core, not 5 and 5.
    """
    group = heads // kv_heads
    least = -(-heads // cores)

    def run(slots: int) -> int:
        return gcd(slots, group)

    slots = min(range(least, least + group), key=lambda n: (n + 2 * n // run(n), n))
    step = run(slots)
    queries, keys = [], []
    for core in range(cores):
        assigned = range(core * slots, (core + 1) * slots)
        queries.append(tuple(head if head < heads else None for head in assigned))
        keys.append(tuple(head // group if head < heads else None for head in assigned[::step]))
    return HeadPlan(tuple(queries), tuple(keys))


def distribute_as_nxd(heads: int, kv_heads: int, cores: int) -> HeadPlan:
    """Assign the heads as NxD Inference's attention does (``modules/attention/gqa.py``, 0.9).

    If the cores are a multiple of the key heads, a key head is repeated until each core has one, and every group of
    query heads ends with its heads of zeros. Otherwise each query head gets a copy of its key head, unless the key
    heads divide over the cores, and the heads of zeros come last.
    """
    group, total = heads // kv_heads, -(-heads // cores) * cores
    repeated = cores % kv_heads == 0
    queries: list[int | None]
    if repeated:
        zeros = (total - heads) // kv_heads
        queries = [head for k in range(kv_heads) for head in [*range(k * group, (k + 1) * group), *[None] * zeros]]
    else:
        queries = [*range(heads), *[None] * (total - heads)]
    if kv_heads % cores == 0:
        keys: list[int | None] = list(range(kv_heads))
    elif repeated:
        keys = [k for k in range(kv_heads) for _ in range(cores // kv_heads)]
    else:
        keys = [None if head is None else head // group for head in queries]
    wide, narrow = len(queries) // cores, len(keys) // cores
    return HeadPlan(
        tuple(tuple(queries[core * wide :][:wide]) for core in range(cores)),
        tuple(tuple(keys[core * narrow :][:narrow]) for core in range(cores)),
    )


def take_heads(tensor: Tensor, heads: tuple[int | None, ...], size: int, dim: int) -> Tensor:
    """Concatenate the slices of ``tensor`` of these heads, ``size`` wide each, along ``dim``; None gives zeros."""
    parts = [
        torch.zeros_like(tensor.narrow(dim, 0, size)) if head is None else tensor.narrow(dim, head * size, size)
        for head in heads
    ]
    return torch.cat(parts, dim)
