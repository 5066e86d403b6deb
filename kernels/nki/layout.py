"""Weights as the Trainium kernels read them: packed once offline, long contiguous rows for every partition.

A dimension of ``size`` is cut into the fewest chunks of at most 128, of equal width but for the last partition: index
``p * count + c`` lies on partition ``p`` of chunk ``c``. So a tensor [size, tokens] in HBM gives each partition one
contiguous run of ``count * tokens`` elements, no chunk is nearly empty (576 is five chunks of 116 or 115, not four
of 128 and one of 64), and the order costs nothing: it is undone by packing the next weight alike.

A packed weight is a flat tensor of *panels*. A panel holds a few whole column chunks and the whole contraction, as
[partitions, row chunks, columns]: each partition's part is contiguous, 8 KiB or more where the weight is large enough
(a DMA reaches 0.97 of its rate with rows of 4 KiB, 0.21 with 512 bytes). The last panels are smaller, so that little is
left to compute when the last byte of a weight is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from neuronmm.kernels.nki.objects import Chunks, Panel

ROW_BYTES = 8192
"""What a partition's row of a panel has at least, if the weight is large enough."""
LAST_ROW_BYTES = 2048
"""The same for the last panels."""


def order(cut: Chunks) -> list[int]:
    """The indices of a dimension, chunk by chunk."""
    return [p * cut.count + c for c in range(cut.count) for p in range(cut.length(c))]


@dataclass(frozen=True)
class Packing:
    """How a weight [columns, rows] (out and in features of a linear) is packed: ``group`` column chunks a panel, in the
    last panels half as many each time, down to ``least``."""

    rows: Chunks
    columns: Chunks
    group: int
    least: int

    @classmethod
    def of(cls, rows: int, columns: int, element_bytes: int) -> Packing:
        """The packing of a weight: powers of two of column chunks a panel, so that rows are long enough."""
        r, c = Chunks(rows), Chunks(columns)

        def chunks(row_bytes: int) -> int:
            group = 1
            while group < c.count and r.count * c.width * group * element_bytes < row_bytes:
                group *= 2
            return group

        return cls(r, c, chunks(ROW_BYTES), chunks(LAST_ROW_BYTES))

    @property
    def elements(self) -> int:
        """Elements of the packed tensor: padded by less than one partition's rows."""
        return self.rows.width * self.rows.count * self.columns.size

    def chunks_of_panels(self) -> list[int]:
        """How many column chunks each panel has; every ``group`` chunks a panel begins."""
        whole = (self.columns.count - 1) // self.group
        left, half = self.columns.count - whole * self.group, self.group // 2
        sizes = [self.group] * whole
        if whole and half >= self.least:
            sizes[-1:] = [half, half]
        while left // 2 >= self.least:
            sizes.append(left - left // 2)
            left //= 2
        return [*sizes, left]

    def panels(self) -> list[Panel]:
        """The panels in the order they lie in memory."""
        result, first, offset = [], 0, 0
        for chunks in self.chunks_of_panels():
            last = first + chunks
            columns = self.columns.start(last) - self.columns.start(first)
            result.append(Panel(offset, first, last, columns))
            first, offset = last, offset + self.rows.width * self.rows.count * columns
        return result


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
    """The weight [columns, rows] that :func:`pack` packed (without the scale)."""
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
