"""Weights as the Trainium kernels read them: packed once offline, with long contiguous rows for every partition.

A dimension of ``size`` is cut into the fewest chunks of at most 128, of equal width except for the last partition.
Index ``p * count + c`` is on partition ``p`` of chunk ``c``. A tensor [size, tokens] in HBM therefore gives each
partition one contiguous run of ``count * tokens`` elements, and no chunk is nearly empty: 576 is five chunks of 116 or
115, not four of 128 and one of 64. The order costs nothing, because the next weight is packed in the same order. The
dimensions of pivoted linears are cut in segments (:mod:`.forms`).

A packed weight is a flat tensor of *panels*. A panel is a few complete column chunks over the complete contraction, as
[partitions, row chunks, columns]. The part of each partition is contiguous, 8 KiB or more if the weight is large enough
(a DMA reaches 0.97 of its rate with rows of 4 KiB, 0.21 with 512 bytes). The last panels are smaller, so that little is
left to compute when the last byte of a weight arrives. If the row chunks have different widths, a partition has only
those that are wide enough, or a little less, so that little is padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from neuronmm.kernels.nki.objects import PARTITIONS, Chunks, Factor, Panel, Piece, Segment

ROW_BYTES = 8192
"""Minimum bytes of each partition's row in a panel, if the weight is large enough."""
LAST_ROW_BYTES = 2048
"""The same for the last panels of a weight."""
ENGINES = 16
"""DMA engines: each moves some of a transfer's partitions."""

FactorPlan = tuple[Any, ...]
"""A :class:`Packing` as numbers and tuples of numbers (:meth:`Packing.plan`)."""


def order(cut: Chunks) -> list[int]:
    """Return the indices of a dimension, chunk by chunk."""
    return [i for c in range(cut.count) for i in features(cut, c)]


def features(cut: Chunks, chunk: int) -> range:
    """Return the indices of one chunk."""
    s = next(s for s in cut.segments if s.first <= chunk < s.first + s.count)
    start = s.start + chunk - s.first
    return range(start, start + cut.length(chunk) * s.count, s.count)


@dataclass(frozen=True)
class Packing:
    """How a weight [columns, rows] (out and in features of a linear) is packed.

    A panel has ``group`` column chunks. The last panels halve that number each time, down to ``least``. ``stored``,
    ``copied`` and ``copies`` describe the identity block of a pivoted linear (:class:`.objects.Factor`).
    """

    rows: Chunks
    columns: Chunks
    group: int
    least: int
    stored: int
    copied: int
    copies: int

    @classmethod
    def of(cls, rows: int, columns: int, element_bytes: int) -> Packing:
        """Return the packing of a weight: the least power of two of column chunks per panel with rows long enough."""
        return cls.cut(Chunks(rows), Chunks(columns), element_bytes)

    @classmethod
    def cut(
        cls, r: Chunks, c: Chunks, element_bytes: int, stored: int | None = None, copied: tuple[int, int] = (0, 0)
    ) -> Packing:
        """Return the packing of a weight with these row and column chunks.

        ``stored``: row chunks without an identity block, None: all. ``copied``: first and number of the copied chunks.
        """
        deep = r.count if stored is None else stored

        def chunks(row_bytes: int) -> int:
            group = 1
            while group < c.count and deep * c.width * group * element_bytes < row_bytes:
                group *= 2
            return group

        return cls(r, c, chunks(ROW_BYTES), chunks(LAST_ROW_BYTES), deep, *copied)

    @cached_property
    def elements(self) -> int:
        """Elements of the packed tensor, padding included."""
        return self._rows * sum(panel.columns for panel in self.panels)

    @property
    def computed(self) -> int:
        """Column chunks that are computed: all but the copied ones."""
        return self.columns.count - self.copies

    @cached_property
    def _rows(self) -> int:
        """Rows of a column, padding included."""
        return sum(partitions * s.count for s, partitions in self._segments())

    def _segments(self) -> list[tuple[Segment, int]]:
        """Return the stored segments of the rows with their partitions, padding included.

        They are padded to multiples of :data:`ENGINES` if that makes the transfers shorter.
        """
        stored = [s for s in self.rows.segments if s.first < self.stored]
        widest = max(s.width for s in stored)
        padded = [(s, min(widest, -(-s.width // ENGINES) * ENGINES)) for s in stored]
        return min([(s, s.width) for s in stored], padded, key=_rows_per_engine)

    def chunks_of_panels(self) -> list[int]:
        """Return the column chunks of each panel if none is copied. A panel begins every ``group`` chunks."""
        full = (self.columns.count - 1) // self.group
        left, half = self.columns.count - full * self.group, self.group // 2
        sizes = [self.group] * full
        if full and half >= self.least:
            sizes[-1:] = [half, half]
        while left // 2 >= self.least:
            sizes.append(left - left // 2)
            left //= 2
        return [*sizes, left]

    @cached_property
    def panels(self) -> list[Panel]:
        """The panels in their order in memory; copied chunks divide or shorten a panel."""
        panels, begin, offset = [], 0, 0
        skip, resume = self.copied, self.copied + self.copies
        for chunks in self.chunks_of_panels():
            end = begin + chunks
            for first, last in ((begin, min(end, skip)), (max(begin, resume), end)):
                if first < last:
                    columns = self.columns.start(last) - self.columns.start(first)
                    panels.append(Panel(offset, first, last, columns))
                    offset += self._rows * columns
            begin = end
        return panels

    def pieces(self) -> list[Piece]:
        """Return the pieces of every panel: partitions with the same row chunks, and consecutive ones among these."""
        pieces: list[Piece] = []
        offset = 0
        for begin, end, wide in _bands(self._segments()):
            chunks, index = sum(s.count for s in wide), 0
            for s in wide:
                if index and pieces[-1].last == s.first:
                    pieces[-1].last += s.count
                else:
                    pieces.append(Piece(begin, end, s.first, s.first + s.count, chunks, offset + index))
                index += s.count
            offset += (end - begin) * chunks
        return pieces

    def plan(self) -> FactorPlan:
        """Return what :func:`.objects.factor` takes: sizes and borders, group, panels, pieces, the identity block."""
        panels = tuple((p.offset, p.first, p.last, p.columns) for p in self.panels)
        pieces = tuple((p.begin, p.end, p.first, p.last, p.chunks, p.offset) for p in self.pieces())
        cuts = self.rows.size, self.rows.borders, self.columns.size, self.columns.borders
        return *cuts, self.group, panels, pieces, self.stored, self.copied, self.copies

    def factor(self, packed: Any) -> Factor:
        """Describe a tensor that is packed like this."""
        cuts = self.rows, self.columns
        identity = self.stored, self.copied, self.copies
        return Factor(packed, *cuts, self.group, self.panels, self.pieces(), *identity)


def pack(weight: Tensor, scale: Tensor | None = None, packing: Packing | None = None) -> Tensor:
    """Pack a linear's weight for the kernels; ``scale`` (a norm's weight) multiplies its input features first.

    Dimensions: ``weight`` [out, in] without the identity block of ``packing``, ``scale`` [in] or None, result flat, of
    the weight's dtype.
    """
    packing = packing or Packing.of(weight.shape[1], len(weight), weight.element_size())
    if scale is not None:
        weight = (weight.float() * scale.float()).to(weight.dtype)
    f = packing.factor(weight)
    columns, rows = _columns(f), f.rows
    chunks = weight.new_zeros(len(columns), f.stored, rows.width)
    ordered = weight[stored_index(f, columns)]
    for c in range(f.stored):
        chunks[:, c, : rows.length(c)] = ordered[:, list(features(rows, c))]
    parts = []
    for panel, part in zip(f.panels, chunks.split([panel.columns for panel in f.panels]), strict=True):
        assert len(part) == panel.columns
        for begin in sorted({p.begin for p in f.pieces}):
            band = [part[:, p.first : p.last, p.begin : p.end] for p in f.pieces if p.begin == begin]
            parts.append(torch.cat(band, dim=1).permute(2, 1, 0).reshape(-1))
    return torch.cat(parts)


def unpack(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Return the weight [columns, rows] that :func:`pack` packed; the scale stays in it."""
    return unpacked(Packing.of(rows, columns, packed.element_size()).factor(packed))


def unpacked(f: Factor) -> Tensor:
    """Return the weight [out, in] of a factor, with its identity block; a scaled one in float32, times its scales."""
    packed = f.weights.float() if f.scaled else f.weights
    weight = packed.new_zeros(f.columns.size, f.rows.size)
    parts = []
    for panel in f.panels:
        chunks = packed.new_zeros(panel.columns, f.stored, f.rows.width)
        for p in f.pieces:
            stride = p.chunks * panel.columns
            size = (p.end - p.begin, p.last - p.first, panel.columns)
            start = packed.storage_offset() + panel.offset + p.offset * panel.columns
            piece = packed.as_strided(size, (stride, panel.columns, 1), start)
            chunks[:, p.first : p.last, p.begin : p.end] = piece.permute(2, 1, 0)
        parts.append(chunks)
    chunks, columns = torch.cat(parts), torch.tensor(_columns(f))
    for c in range(f.stored):
        index = torch.tensor(features(f.rows, c))
        weight[columns[:, None], index] = chunks[:, c, : len(index)]
    if f.scaled:
        weight *= from_columns(f.table[:, f.at :], f.columns)[:, None]
    first, pivots = f.columns.start(f.copied), f.rows.start(f.copies)
    weight[first : first + pivots, :pivots] = torch.eye(pivots, dtype=weight.dtype)
    first = f.rows.start(f.stored)
    pivots = f.rows.size - first
    weight[:pivots, first:] = torch.eye(pivots, dtype=weight.dtype)
    return weight


def to_columns(values: Tensor, cut: Chunks) -> Tensor:
    """Return a vector [features of ``cut``] as float32 [128, chunks]; partitions that a chunk does not have have 1."""
    columns = torch.ones(PARTITIONS, cut.count)
    for c in range(cut.count):
        columns[: cut.length(c), c] = values[list(features(cut, c))].float()
    return columns


def from_columns(columns: Tensor, cut: Chunks) -> Tensor:
    """Return the vector whose :func:`to_columns` begin a tensor [128, any number]."""
    values = torch.empty(cut.size)
    for c in range(cut.count):
        values[list(features(cut, c))] = columns[: cut.length(c), c]
    return values


def _columns(f: Factor) -> list[int]:
    """Return the output features in the order of the panels."""
    return [i for panel in f.panels for c in range(panel.first, panel.last) for i in features(f.columns, c)]


def stored_index(f: Factor | Packing, columns: list[int]) -> list[int]:
    """Return the rows of the stored weight that have these output features."""
    start, pivots = f.columns.start(f.copied), f.rows.start(f.copies)
    return [i if i < start else i - pivots for i in columns]


def _bands(segments: list[tuple[Segment, int]]) -> list[tuple[int, int, list[Segment]]]:
    """Return ranges of partitions, each with the segments that have them."""
    bounds = pairwise([0, *sorted({partitions for _, partitions in segments})])
    return [(begin, end, [s for s, partitions in segments if partitions >= end]) for begin, end in bounds]


def _rows_per_engine(segments: list[tuple[Segment, int]]) -> int:
    """Return the row chunks that the busiest DMA engine moves per column."""
    return sum(-(-(end - begin) // ENGINES) * sum(s.count for s in wide) for begin, end, wide in _bands(segments))
