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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from neuronmm.kernels.nki.objects import PARTITIONS
from neuronmm.kernels.nki.problem import Pivots, Ranks
from neuronmm.models.spec import PivotedForm

TILE = PARTITIONS
"""Features of a chunk that fills the tensor engine."""
MLP = ("gate", "up", "down")


@dataclass(frozen=True)
class Split:
    """An MLP on several cores.

    ``total``, ``per_core``: sizes and pivots of the MLP and of each core's part. ``features`` [cores, intermediate /
    cores]: the features of each core in its order.
    """

    total: Ranks
    per_core: Ranks
    features: Tensor

    def parts_of_a(self, name: str, A: Tensor) -> list[Tensor]:
        """Return the A that each core stores. Dimensions: ``A`` [r, in] of the MLP, with its identity block."""
        orders = self._orders(name)
        if name != "down":
            return [A[order] for order in orders]
        stored = self.features[:, : self.per_core.intermediate - self.per_core.down_pivots]
        return [A[order][:, features] for order, features in zip(orders, stored, strict=True)]

    def parts_of_b(self, name: str, B: Tensor, leader: str) -> list[Tensor]:
        """Return the B that each core stores. Dimensions: ``B`` [out, r] of the MLP, with its identity block.

        ``leader``: the linear whose A it uses, and with it the order of the rank.
        """
        orders = self._orders(leader)
        if name == "down":
            return [B[:, order] for order in orders]
        pivots = self.per_core.pivots[MLP.index(name)] or Pivots(0, 0)
        stored = torch.cat([self.features[:, : pivots.first], self.features[:, pivots.end :]], dim=1)
        return [B[features][:, order] for features, order in zip(stored, orders, strict=True)]

    def _orders(self, name: str) -> list[Tensor]:
        """Return the order of a linear's rank on each core: first the pivots of that core."""
        index, rank = MLP.index(name), getattr(self.total, name)
        total, per_core = self.total.pivots[index], self.per_core.pivots[index]
        if total is None or per_core is None:
            return [torch.arange(rank)] * len(self.features)
        orders = []
        for pivots in self.features[:, per_core.first : per_core.end] - total.first:
            others = torch.ones(rank, dtype=torch.bool)
            others[pivots] = False
            orders.append(torch.cat([pivots, others.nonzero()[:, 0]]))
        return orders


class Group(NamedTuple):
    """Features that are pivots of the same ``linears`` of :data:`MLP`; of none: ordinary features."""

    linears: frozenset[str]
    features: list[int]


def split_mlp(
    linears: Sequence[str],
    ranks: Mapping[str, int],
    shared: Mapping[str, str],
    forms: Mapping[str, PivotedForm],
    intermediate: int,
    cores: int,
) -> Split | None:
    """Split an MLP with the pivots that its kernel uses: ranges, in the kernel's forms. None if a linear is dense.

    ``linears``: the names of gate, up and down. The other arguments are those of a checkpoint, by name.
    """
    if any(linear not in ranks for linear in linears):
        return None
    wanted = ("rows", "rows", "columns")
    gate, up, down = (
        _kept(ranks[linear], forms.get(linear), form, intermediate)
        for linear, form in zip(linears, wanted, strict=True)
    )
    if shared.get(linears[0]) == linears[1]:  # with one A, the kernel takes gate's pivots only
        up = None
    sizes = ranks[linears[0]], ranks[linears[1]], ranks[linears[2]], intermediate
    return split(Ranks(*sizes, gate, up, down.number if down else 0), cores, TILE)


def _kept(rank: int, entry: PivotedForm | None, form: str, intermediate: int) -> Pivots | None:
    """Return the pivots of a linear if it has this form and they are a range of the intermediate features."""
    if entry is None or entry.form != form or rank >= intermediate:
        return None
    first = intermediate - rank if form == "columns" else entry.first
    return None if first is None else Pivots(first, rank)


def split(total: Ranks, cores: int, tile: int = TILE) -> Split:
    """Split an MLP whose intermediate size is a multiple of ``cores``; a core gets full tiles of a group's pivots."""
    groups = _even(_groups(total), cores * tile if cores > 1 else 1)
    sizes = [len(group.features) // cores for group in groups]
    features = [
        [feature for group, size in zip(groups, sizes, strict=True) for feature in group.features[size * core :][:size]]
        for core in range(cores)
    ]

    def pivots(linear: str) -> Pivots | None:
        members = [index for index, group in enumerate(groups) if linear in group.linears and sizes[index]]
        return Pivots(sum(sizes[: members[0]]), sum(sizes[index] for index in members)) if members else None

    gate, up, down = (pivots(linear) for linear in MLP)
    ranks = total.gate, total.up, total.down, total.intermediate // cores
    return Split(total, Ranks(*ranks, gate, up, down.number if down else 0), torch.tensor(features))


def _groups(total: Ranks) -> list[Group]:
    """Cut the intermediate dimension at the ends of the ranges of pivots."""
    ranges = {linear: pivots for linear, pivots in zip(MLP, total.pivots, strict=True) if pivots}
    ends = sorted({0, total.intermediate, *(end for p in ranges.values() for end in (p.first, p.end))})
    return [
        Group(frozenset(linear for linear, p in ranges.items() if p.first <= begin < p.end), list(range(begin, end)))
        for begin, end in pairwise(ends)
    ]


def _even(groups: list[Group], unit: int) -> list[Group]:
    """Return one group of ordinary features, then the others in their order with multiples of ``unit`` features.

    The surplus of a group goes to a group of fewer of its linears, and at last to the ordinary features.
    """
    filled: dict[int, Group] = {}
    surplus: list[Group] = []
    for index in sorted(range(len(groups)), key=lambda i: len(groups[i].linears), reverse=True):
        linears = groups[index].linears
        fitting = [group for group in surplus if group.linears >= linears]
        features = [feature for group in (groups[index], *fitting) for feature in group.features]
        count = len(features) // unit * unit if linears else 0
        filled[index] = Group(linears, features[:count])
        surplus = [group for group in surplus if group not in fitting] + [Group(linears, features[count:])]
    ordinary = sorted(feature for group in surplus for feature in group.features)
    return [Group(frozenset(), ordinary), *(filled[index] for index in range(len(groups)))]
