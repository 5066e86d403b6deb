"""Which factorised linears a Neuron host runs as low-rank ones, and which as the dense matrix.

Only an MLP that one kernel computes keeps its pivots (:mod:`.intermediate`). A host expands all other pivoted linears,
and two factors have r (in + out) weights: more than the matrix itself if the rank is above break-even, which the
pivoted form makes worth while. Such a linear is expanded to the matrix. It then costs what it costs in the dense model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from neuronmm.models.families import LINEARS
from neuronmm.models.neuronx.checkpoint import layer_name


class LowRankPlan(NamedTuple):
    """The rank of a low-rank linear, and the short name of the linear whose A it uses; None: its own."""

    rank: int
    leader: str | None


def low_rank(
    layer: int,
    shapes: Mapping[str, tuple[int, int]],
    ranks: Mapping[str, int],
    shared: Mapping[str, str],
    kept: Collection[str],
) -> dict[str, LowRankPlan]:
    """Return, by short name, the linears of a layer whose two factors are fewer weights, or whose pivots are used.

    Linears with one A are counted together, and stay or go together.

    Args:
        layer: its number.
        shapes: [out, in] of the linears in the whole model, by short name.
        ranks: of the factorised linears of the checkpoint.
        shared: linear -> the linear whose A it uses, of the checkpoint.
        kept: short names of linears that stay low-rank in any case.
    """
    short = {layer_name(layer, LINEARS[name]): name for name in shapes}
    leaders = {name: short[shared[full]] if full in shared else None for full, name in short.items() if full in ranks}
    groups: dict[str, list[str]] = {}
    for name, leader in leaders.items():
        groups.setdefault(leader or name, []).append(name)
    chosen: dict[str, LowRankPlan] = {}
    for leader, members in groups.items():
        rank = ranks[layer_name(layer, LINEARS[leader])]
        inputs, outputs = shapes[leader][1], sum(shapes[name][0] for name in members)
        if leader in kept or rank * (inputs + outputs) < inputs * outputs:
            chosen |= {name: LowRankPlan(rank, leaders[name]) for name in members}
    return chosen
