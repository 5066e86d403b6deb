"""Split the intermediate dimension of an MLP over the cores, so that every core has as many pivots as the others.

All cores run one kernel, so the ranges of pivots are the same features of every core's part. The order of the dimension
is free: a core may have any features, in any order. The ends of the ranges divide the dimension into regions, each
inside or outside every range. A core gets ``size // cores`` features of every region, in the order of the regions. What
is left of the regions is shared out as features without pivots: a pivot among them is an ordinary feature there, whose
row or column of the other factor is one of the identity. Regions whose sizes are multiples of the cores leave nothing.

The order of a rank is free on every core too. A core has all rows of ``P`` or columns of ``Q``, its own pivots first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from neuronmm.kernels.nki.problem import Pivots, Ranks


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


def split(whole: Ranks, cores: int) -> Parts:
    """Split an MLP whose intermediate size is a multiple of ``cores``."""
    ends = {end for pivots in whole.pivots if pivots for end in (pivots.first, pivots.end)}
    regions = [range(*bounds) for bounds in pairwise(sorted({0, whole.intermediate, *ends}))]
    outside = [not any(p.first <= region.start < p.end for p in whole.pivots if p) for region in regions]
    left = [feature for region in regions for feature in region[len(region) // cores * cores :]]
    shared_out: list[Sequence[int]] = [*regions]
    shared_out.insert(outside.index(True) if True in outside else 0, left)
    features = [
        [feature for of_all in shared_out for feature in of_all[len(of_all) // cores * core :][: len(of_all) // cores]]
        for core in range(cores)
    ]

    def part_of(pivots: Pivots | None) -> Pivots | None:
        """Return the pivots in a part: those of a core that are not what is left of the regions."""
        own = set(range(*(pivots.first, pivots.end) if pivots else (0, 0))).difference(left)
        places = [place for place, feature in enumerate(features[0]) if feature in own]
        return Pivots(places[0], len(places)) if places else None

    gate, up, down = (part_of(pivots) for pivots in whole.pivots)
    sizes = whole.gate, whole.up, whole.down, whole.intermediate // cores
    return Parts(whole, Ranks(*sizes, gate, up, down.number if down else 0), torch.tensor(features))
