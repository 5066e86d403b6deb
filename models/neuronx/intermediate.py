"""Split the intermediate dimension of an MLP over the cores, so that every core has as many pivots as the others.

All cores run one kernel, so the pivots are the same range of every core's part. The order of the dimension is free: a
core may have any features, in any order. The ends of the ranges divide the dimension into groups of features that are
pivots of the same linears, and a core gets as many features of each group as the others.

That number is a multiple of the kernels' tile, because chunks that do not fill the tensor engine cost more time than
they save (predicted). The remaining pivots become ordinary features: the stored factor then has a row or column of the
identity for each. On one core every pivot remains a pivot.

The order of a rank is free on every core too. A core has all rows of ``P`` or columns of ``Q``, its own pivots first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from neuronmm.kernels.nki.objects import PARTITIONS
from neuronmm.kernels.nki.problem import Pivots, Ranks

TILE = PARTITIONS
"""Features of a chunk that fills the tensor engine."""


@dataclass(frozen=True)
class Parts:
    """The parts of an MLP on several cores.

    ``whole``, ``part``: sizes and pivots of the MLP and of each part. ``features`` [cores, intermediate / cores]: the
    features of each part in its order.
    """

    whole: Ranks
    part: Ranks
    features: Tensor

    def of_a(self, name: str, weight: Tensor) -> list[Tensor]:
        """Return the A of each core as its form stores it, for A [r, in] of gate, up or down with two factors."""
        if name != "down":
            return [weight[rows] for rows in self._orders(name)]
        stored = self.features[:, : self.part.intermediate - self.part.down_pivots]
        return [weight[rows][:, columns] for rows, columns in zip(self._orders(name), stored, strict=True)]

    def of_b(self, name: str, weight: Tensor, leader: str) -> list[Tensor]:
        """Return the B of each core as its form stores it, for B [out, r]; ``leader`` has the A that it uses."""
        orders, pivots = self._orders(leader), self._pivots(name)[1]
        if name == "down":
            return [weight[:, columns] for columns in orders]
        first, end = (pivots.first, pivots.end) if pivots else (0, 0)
        stored = torch.cat([self.features[:, :first], self.features[:, end:]], dim=1)
        return [weight[rows][:, columns] for rows, columns in zip(stored, orders, strict=True)]

    def _pivots(self, name: str) -> tuple[Pivots | None, Pivots | None]:
        index = ("gate", "up", "down").index(name)
        return self.whole.pivots[index], self.part.pivots[index]

    def _orders(self, name: str) -> list[Tensor]:
        """Return the order of a linear's rank on each core: first the core's own pivots."""
        whole, part = self._pivots(name)
        rank = getattr(self.whole, name)
        if whole is None or part is None:
            return [torch.arange(rank)] * len(self.features)
        orders = []
        for own in self.features[:, part.first : part.end] - whole.first:
            other = torch.ones(rank, dtype=torch.bool)
            other[own] = False
            orders.append(torch.cat([own, other.nonzero()[:, 0]]))
        return orders


class Group(NamedTuple):
    """Features that are pivots of the same linears: indices into :attr:`.Ranks.pivots`, none for ordinary features."""

    linears: frozenset[int]
    features: list[int]


def split(whole: Ranks, cores: int, tile: int = TILE) -> Parts:
    """Split an MLP whose intermediate size is a multiple of ``cores``; a part has a multiple of ``tile`` per group."""
    groups = _even(_groups(whole), cores * tile if cores > 1 else 1)
    sizes = [len(group.features) // cores for group in groups]
    features = [
        [feature for group, size in zip(groups, sizes, strict=True) for feature in group.features[size * core :][:size]]
        for core in range(cores)
    ]

    def pivots(linear: int) -> Pivots | None:
        own = [index for index, group in enumerate(groups) if linear in group.linears and sizes[index]]
        return Pivots(sum(sizes[: own[0]]), sum(sizes[index] for index in own)) if own else None

    gate, up, down = (pivots(linear) for linear in range(3))
    part = Ranks(whole.gate, whole.up, whole.down, whole.intermediate // cores, gate, up, down.number if down else 0)
    return Parts(whole, part, torch.tensor(features))


def _groups(whole: Ranks) -> list[Group]:
    """Cut the intermediate dimension at the ends of the ranges of pivots."""
    ends = {end for pivots in whole.pivots if pivots for end in (pivots.first, pivots.end)}
    return [
        Group(
            frozenset(i for i, p in enumerate(whole.pivots) if p and p.first <= begin < p.end), list(range(begin, end))
        )
        for begin, end in pairwise(sorted({0, whole.intermediate, *ends}))
    ]


def _even(groups: list[Group], unit: int) -> list[Group]:
    """Return one group of ordinary features, then the others in their order with multiples of ``unit`` features.

    What is left of a group fills up a group of fewer of its linears, and at last that of the ordinary features.
    """
    filled: dict[int, Group] = {}
    left: list[Group] = []
    for index in sorted(range(len(groups)), key=lambda i: len(groups[i].linears), reverse=True):
        linears, own = groups[index]
        features = [*own, *(feature for group in left if group.linears >= linears for feature in group.features)]
        count = len(features) // unit * unit if linears else 0
        filled[index] = Group(linears, features[:count])
        left = [group for group in left if not group.linears >= linears] + [Group(linears, features[count:])]
    ordinary = sorted(feature for group in left for feature in group.features)
    return [Group(frozenset(), ordinary), *(filled[index] for index in range(len(groups)))]
