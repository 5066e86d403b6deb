"""Change a decoder layer's factorised linears from two factors to pivoted forms, and back.

The order of the intermediate dimension of a SwiGLU MLP is free: the same permutation of gate's and up's outputs and of
down's inputs changes nothing. It is chosen so that the pivots of each linear are a contiguous range, and those of down
are the last features; then no kernel gathers or scatters. From first to last::

    neither | gate | gate, up | gate, up, down | gate, down | down

Gate and up with a shared A take all pivots from gate. With two A, the pivots of the one of lower rank are among the
pivots of the other, and both sets are chosen together. The linears of attention have a fixed order, so their pivots are
an index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from neuronmm.compression.pivots import Skeleton
from neuronmm.compression.ranks import TILE
from neuronmm.kernels import Form, LowRank
from neuronmm.kernels.low_bits import dense
from neuronmm.models.families import TARGETS

GATE, UP, DOWN = TARGETS["mlp"]


@dataclass
class LayerFactors:
    """The linears of one decoder layer by their names inside the layer.

    ``low_rank`` holds the factorised ones, of which ``shared`` maps some to the linear whose A they use. ``order``
    [intermediate] is the feature at each position of the MLP's intermediate dimension, None if unchanged.
    ``conditions`` are the condition numbers of the pivots.
    """

    low_rank: dict[str, LowRank]
    shared: Mapping[str, str]
    order: Tensor | None = None
    conditions: dict[str, float | None] = field(default_factory=dict)


def to_pivoted(layer: LayerFactors) -> LayerFactors:
    """Return the layer with every linear in the row or column form; the matrices stay the same.

    Ranges of pivots that overlap do so in a multiple of the tile that all ranks of the MLP are multiples of, if the
    rest of the pivots allow it. Linears with a shared A of more rows than their leader has outputs keep two factors.

    Args:
        layer: linears with two factors, of any float dtype. The result is float64.
    """
    skeletons = _skeletons(layer)
    order = _order_mlp(skeletons)
    pivoted = LayerFactors({}, layer.shared, order)
    for name in sorted(layer.low_rank, key=lambda name: name in layer.shared):  # leaders first
        factors, leader = layer.low_rank[name], layer.shared.get(name, name)
        A, B, bias = _matrices(factors)
        if name in (GATE, UP) and order is not None:
            B, bias = B[order], None if bias is None else bias[order]
        if name == DOWN and order is not None:
            A = A[:, order]
        skeleton = skeletons.get(leader)
        if skeleton is None:
            pivoted.low_rank[name] = LowRank(A, B, bias)
        elif name != leader:
            pivoted.low_rank[name] = LowRank(pivoted.low_rank[leader].A, skeleton.express(B), bias)
        else:
            pivoted.low_rank[name] = _pivoted(name, bias, skeleton)
            pivoted.conditions[name] = skeleton.condition
    return pivoted


def to_two(layer: LayerFactors) -> LayerFactors:
    """Return the layer with two factors for every linear. The MLP keeps its order."""
    low_rank = {name: factors.expanded(torch.float64) for name, factors in layer.low_rank.items()}
    for name, leader in layer.shared.items():
        low_rank[name] = low_rank[name]._replace(A=low_rank[leader].A)
    return LayerFactors(low_rank, layer.shared)


def in_order(name: str, tensor: Tensor, order: Tensor | None) -> Tensor:
    """Return a dense weight or bias, ``name`` inside the layer, with the MLP's intermediate dimension in ``order``."""
    linear = name.rpartition(".")[0]
    if order is None or linear not in (GATE, UP, DOWN):
        return tensor
    order = order.to(tensor.device)
    if linear != DOWN:
        return tensor[order]
    return tensor[:, order] if tensor.ndim == 2 else tensor


def forms_of(low_rank: Mapping[str, LowRank], prefix: str) -> dict[str, dict[str, Any]]:
    """Return the entries of ``forms`` in ``quantization_config``; ``prefix`` completes the names of the linears."""
    return {
        prefix + name: {
            "form": factors.form.value,
            "first": factors.pivots if isinstance(factors.pivots, int) else None,
        }
        for name, factors in low_rank.items()
        if factors.form is not Form.TWO
    }


def _skeletons(layer: LayerFactors) -> dict[str, Skeleton]:
    """Choose the pivots of every linear with an A of its own."""
    skeletons: dict[str, Skeleton] = {}
    # Of gate and up with two A, the one of higher rank is first, and the other chooses among its pivots.
    for name, factors in sorted(layer.low_rank.items(), key=lambda item: -item[1].rank):
        if name in layer.shared or factors.rank > factors.out_features:
            continue
        other = skeletons.get({GATE: UP, UP: GATE}.get(name, ""))
        candidates = None if other is None else other.mask
        A, B, _ = _matrices(factors)
        skeletons[name] = Skeleton(B.T, A.T, candidates) if name == DOWN else Skeleton(A, B, candidates)
        if other is not None:
            other.match(skeletons[name])
    return skeletons


def _order_mlp(skeletons: Mapping[str, Skeleton]) -> Tensor | None:
    """Sort the intermediate dimension, and renumber the rows of the MLP's skeletons; return the order."""
    inner = sorted((skeletons[name] for name in (GATE, UP) if name in skeletons), key=lambda one: len(one.pivots))
    down = skeletons.get(DOWN)
    skeletons_of_mlp = [*inner, *([] if down is None else [down])]
    if not skeletons_of_mlp:
        return None
    none = torch.zeros_like(skeletons_of_mlp[0].mask)
    large = inner[-1].mask if inner else none
    small = inner[0].mask if len(inner) == 2 else none
    align = math.gcd(TILE, *(len(skeleton.pivots) for skeleton in skeletons_of_mlp))
    if down is not None:
        _align_overlap(down, large, ~large, align)
        _align_overlap(down, small, large & ~small, align)
    last = none if down is None else down.mask
    place = torch.where(
        small, torch.where(last, 3, 2), torch.where(large, torch.where(last, 4, 1), torch.where(last, 5, 0))
    )
    order = place.argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)
    for skeleton in skeletons_of_mlp:
        skeleton.reorder(position)
    return order


def _align_overlap(down: Skeleton, inside: Tensor, outside: Tensor, align: int) -> None:
    """Move pivots of ``down`` between the masks ``inside`` and ``outside`` until a multiple of ``align`` is inside."""
    overlap = int((down.mask & inside).sum())
    surplus = overlap - round(overlap / align) * align
    if surplus > 0:
        down.move(surplus, enter=outside, leave=inside)
    else:
        down.move(-surplus, enter=inside, leave=outside)


def _matrices(factors: LowRank) -> tuple[Tensor, Tensor, Tensor | None]:
    return dense(factors.A, torch.float64).double(), dense(factors.B, torch.float64).double(), factors.bias


def _pivoted(name: str, bias: Tensor | None, skeleton: Skeleton) -> LowRank:
    if name == DOWN:
        return LowRank(skeleton.coefficients.T, skeleton.rows.T, bias, Form.COLUMNS)
    pivots = int(skeleton.pivots[0]) if name in (GATE, UP) else skeleton.pivots.to(torch.int32)
    return LowRank(skeleton.rows, skeleton.coefficients, bias, Form.ROWS, pivots)
