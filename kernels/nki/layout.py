"""Weights as the Trainium kernels read them: packed once offline, with long contiguous rows for every partition.

A dimension of ``size`` is cut into the fewest chunks of at most 128, of equal width except for the last partition.
Index ``p * count + c`` is on partition ``p`` of chunk ``c``. A tensor [size, tokens] in HBM therefore gives each
partition one contiguous run of ``count * tokens`` elements, and no chunk is nearly empty: 576 is five chunks of 116 or
115, not four of 128 and one of 64. The order costs nothing, because the next weight is packed in the same order.

A packed weight is a flat tensor of *panels*. A panel is a few complete column chunks over the complete contraction, as
[partitions, row chunks, columns]. The part of each partition is contiguous, 8 KiB or more if the weight is large enough
(a DMA reaches 0.97 of its rate with rows of 4 KiB, 0.21 with 512 bytes). The last panels are smaller, so that little is
left to compute when the last byte of a weight arrives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from neuronmm.kernels.nki.objects import Chunks, Panel

ROW_BYTES = 8192
"""Minimum bytes of each partition's row in a panel, if the weight is large enough."""
LAST_ROW_BYTES = 2048
"""Minimum bytes of each partition's row in the last panels of a weight."""


def order(cut: Chunks) -> list[int]:
    """Return the indices of a dimension, chunk by chunk."""
    return [p * cut.count + c for c in range(cut.count) for p in range(cut.length(c))]


@dataclass(frozen=True)
class Packing:
    """How a weight [columns, rows] (out and in features of a linear) is packed.

    A panel has ``group`` column chunks. The last panels halve that number each time, down to ``least``.
    """

    rows: Chunks
    columns: Chunks
    group: int
    least: int

    @classmethod
    def of(cls, rows: int, columns: int, element_bytes: int) -> Packing:
        """Return the packing of a weight: the least power of two of column chunks per panel with rows long enough."""
        r, c = Chunks(rows), Chunks(columns)

        def chunks(row_bytes: int) -> int:
            group = 1
            while group < c.count and r.count * c.width * group * element_bytes < row_bytes:
                group *= 2
            return group

        return cls(r, c, chunks(ROW_BYTES), chunks(LAST_ROW_BYTES))

    @property
    def elements(self) -> int:
        """Elements of the packed tensor. The padding is less than the rows of one partition."""
        return self.rows.width * self.rows.count * self.columns.size

    def chunks_of_panels(self) -> list[int]:
        """Return the column chunks of each panel. A panel begins every ``group`` chunks."""
        full = (self.columns.count - 1) // self.group
        left, half = self.columns.count - full * self.group, self.group // 2
        sizes = [self.group] * full
        if full and half >= self.least:
            sizes[-1:] = [half, half]
        while left // 2 >= self.least:
            sizes.append(left - left // 2)
            left //= 2
        return [*sizes, left]

    def panels(self) -> list[Panel]:
        """Return the panels in their order in memory."""
        panels, first, offset = [], 0, 0
        for chunks in self.chunks_of_panels():
            last = first + chunks
            columns = self.columns.start(last) - self.columns.start(first)
            panels.append(Panel(offset, first, last, columns))
            first, offset = last, offset + self.rows.width * self.rows.count * columns
        return panels


def pack(weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """Pack a linear's weight for the kernels; ``scale`` (a norm's weight) multiplies its input features first.

    Dimensions: ``weight`` [out, in], ``scale`` [in] or None, result flat, of the weight's dtype.
    """
    columns, rows = weight.shape
    packing = Packing.of(rows, columns, weight.element_size())
    if scale is not None:
        weight = (weight.float() * scale.float()).to(weight.dtype)
    cut = packing.rows
    padded = weight.new_zeros(columns, cut.width * cut.count)
    padded[:, :rows] = weight[order(packing.columns)]
    parts = []
    for panel in packing.panels():
        start = packing.columns.start(panel.first)
        part = padded[start : start + panel.columns].view(panel.columns, cut.width, cut.count)
        parts.append(part.permute(1, 2, 0).reshape(-1))
    return torch.cat(parts)


def unpack(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Return the weight [columns, rows] that :func:`pack` packed; the scale stays in it."""
    packing = Packing.of(rows, columns, packed.element_size())
    cut = packing.rows
    parts = []
    for panel in packing.panels():
        size = cut.width * cut.count * panel.columns
        part = packed[panel.offset : panel.offset + size].view(cut.width, cut.count, panel.columns)
        parts.append(part.permute(2, 0, 1).reshape(panel.columns, -1)[:, :rows])
    weight = torch.cat(parts)
    result = torch.empty_like(weight)
    result[order(packing.columns)] = weight
    return result
