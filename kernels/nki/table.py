"""The table of a kernel whose factors have few bits: all numbers that belong to a feature, in one transfer.

A table is float32 [128, columns]. Partition p of a column has the number of the feature that is on partition p of a
chunk (:mod:`.layout`); partitions that a chunk does not have, and chunks that are copies of pivots, have 1. The columns
are, in this order: the norm's weight, if the kernel normalises its input; the scales of the factors, A before B; the
bias of a linear. As one transfer they take the DMA engines as long as the scales of a single factor would, because the
rows are short.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from neuronmm.kernels.nki.layout import FactorPlan, Packing, features, stored_index, to_columns
from neuronmm.kernels.nki.objects import Chunks


def table(
    scales: Sequence[Tensor], packings: Sequence[Packing], norm: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return the table of factors that are packed by ``packings``.

    Dimensions: each of ``scales`` [stored rows of the factor], ``norm`` [in], ``bias`` [out of the last factor].
    """
    parts = [] if norm is None else [to_columns(norm, packings[0].rows)]
    for values, packing in zip(scales, packings, strict=True):
        cut = packing.columns
        copied = range(packing.copied, packing.copied + packing.copies)
        stored = [i for c in range(cut.count) if c not in copied for i in features(cut, c)]
        of_features = torch.ones(cut.size)
        of_features[stored] = values.float()[stored_index(packing, stored)]
        parts.append(to_columns(of_features, cut))
    parts += [] if bias is None else [to_columns(bias, packings[-1].columns)]
    return torch.cat(parts, dim=1)


def starts(plans: Sequence[FactorPlan], norm: bool, shared: bool = False) -> tuple[int, ...]:
    """Return the first column of each factor; ``shared``: the third factor (up's A) is not read and has none."""
    at = Chunks(plans[0][0], plans[0][1]).count if norm else 0
    first: list[int] = []
    for i, plan in enumerate(plans):
        first.append(at)
        at += 0 if shared and i == 2 else Chunks(plan[2], plan[3]).count
    return tuple(first)
