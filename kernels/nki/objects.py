"""The kernels' arguments and data structures, as classes that every NKI compiler accepts.

The compilers of NKI 0.3 to 0.6 translate a class only if it inherits from ``nki.language.NKIObject``, and support
neither properties nor class methods. ``neuronxcc.nki`` traces any class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NKIObject: Any = object
try:  # noqa: SIM105  # the compilers' subset has no contextlib
    from nki.language import NKIObject  # type: ignore[no-redef]  # pyright: ignore[reportMissingImports]
except ImportError:  # only neuronxcc.nki, or no SDK at all
    pass

PARTITIONS = 128
LONG_ROW = 512
"""Strips of this many tokens or more are moved chunk by chunk: a chunk's rows are then long enough for a DMA."""
COPY, ADD, SILU, MULTIPLY, COLUMNS, BIAS = "copy", "add", "silu", "multiply", "columns", "bias"
"""What an eviction does to a result on its way out of PSUM: nothing (COPY); adds or multiplies another tile of its
shape (ADD, MULTIPLY); applies SiLU; multiplies by one number per token, [128, tokens] (COLUMNS); adds one number per
feature, [partitions, chunks] (BIAS)."""


class Segment(NKIObject):  # type: ignore[misc, valid-type]
    """Features [start, start + size) of a dimension, cut into ``count`` chunks, from chunk ``first`` on.

    Feature ``start + p * count + c`` is on partition ``p`` of chunk ``first + c``. ``width``: partitions of the widest
    chunk. ``full``: chunks of that width; the others have one partition less.
    """

    def __init__(self, start: int, size: int, first: int) -> None:
        self.start = start
        self.first = first
        self.count = -(-size // PARTITIONS)
        self.width = -(-size // self.count)
        self.full = size - (self.width - 1) * self.count


class Chunks(NKIObject):  # type: ignore[misc, valid-type]
    """A dimension of ``size`` cut into ``count`` chunks of at most 128 partitions.

    ``borders``: increasing features at which a chunk begins; the segments between them are cut separately. ``width``:
    partitions of the widest chunk.
    """

    def __init__(self, size: int, borders: tuple[int, ...] = ()) -> None:
        self.size = size
        self.borders = borders
        self.segments = []
        self.count = 0
        self.width = 0
        start = 0
        for end in borders + (size,):  # noqa: RUF005  # the compilers' subset has no starred tuples
            if end > start:
                segment = Segment(start, end - start, self.count)
                self.segments.append(segment)
                self.count += segment.count
                self.width = max(self.width, segment.width)
                start = end

    def length(self, chunk: int) -> int:
        """Return the partitions of one chunk."""
        length = 0
        for s in self.segments:
            if s.first <= chunk < s.first + s.count:
                length = s.width if chunk - s.first < s.full else s.width - 1
        return length

    def start(self, chunk: int) -> int:
        """Return the elements in the chunks before this one."""
        elements = 0
        for s in self.segments:
            if chunk >= s.first:
                elements = s.start + (chunk - s.first) * s.width - max(0, chunk - s.first - s.full)
        return elements


@dataclass
class Panel(NKIObject):  # type: ignore[misc, valid-type]
    """Consecutive column chunks [first, last) of a packed weight: ``columns`` columns, from element ``offset``."""

    offset: int
    first: int
    last: int
    columns: int


@dataclass
class Piece(NKIObject):  # type: ignore[misc, valid-type]
    """Partitions [begin, end) of row chunks [first, last) of every panel: one transfer.

    These partitions have ``chunks`` row chunks in HBM. The piece starts ``offset`` rows of one column after the panel.
    """

    begin: int
    end: int
    first: int
    last: int
    chunks: int
    offset: int


@dataclass
class Factor(NKIObject):  # type: ignore[misc, valid-type]
    """A packed weight in HBM and how it is packed: ``panels`` of up to ``group`` column chunks.

    A weight of a pivoted linear has an identity block, which is not stored (:mod:`.forms`):

    - Row form: column chunk ``copied + i`` of the result is row chunk ``i`` for the first ``copies`` row chunks, and no
      panel has it. In the other forms both numbers are 0.
    - Column form: row chunk ``stored + i`` is added to column chunk ``i`` of the result. In the other forms ``stored``
      is the number of row chunks.

    A weight of few bits is ``scaled``: column ``at + c`` of ``table`` multiplies column chunk ``c`` of the result
    (:mod:`.table`). ``table`` is in HBM, or in SBUF after :func:`.scaling.resident`.

    Dimensions: ``weights`` flat; ``rows`` are the weight's input features, ``columns`` its output features; ``table``
    float32 [128, columns of the table].
    """

    weights: Any
    rows: Chunks
    columns: Chunks
    group: int
    panels: list[Panel]
    pieces: list[Piece]
    stored: int
    copied: int
    copies: int
    scaled: bool = False
    table: Any = 0.0
    at: int = 0


@dataclass
class Parts(NKIObject):  # type: ignore[misc, valid-type]
    """A strip's activation in SBUF: chunk c is slot ``slots[c]`` of ``tiles[c]`` [partitions, chunks, tokens]."""

    tiles: list[Any]
    slots: list[int]


@dataclass
class Sizes(NKIObject):  # type: ignore[misc, valid-type]
    """:class:`.problem.Blocks` inside a kernel."""

    tokens: int
    moving: int
    depth: int
    intermediate: int
    panels: int


@dataclass
class Options(NKIObject):  # type: ignore[misc, valid-type]
    """What a kernel does besides its matmuls.

    ``epsilon``: above 0 the kernel RMS-normalises its input. The norm's weight is packed into the factors that read it;
    if these are scaled, it is at the head of their table.
    ``biased``, ``adds``: the kernel adds ``bias`` [out], or ``residual`` (shaped like the output), to the result. The
    bias of a scaled factor is in its table, after its scales, and ``bias`` is not read.
    ``tokens_first``: activations in HBM are [tokens, features] instead of [features, tokens].
    ``partial``: the MLP stops before B of down and returns ``A_down`` of the activation. A tensor-parallel host sums
    that over the cores, which is less data than the hidden size, and applies B itself.
    """

    epsilon: float = 0.0
    biased: bool = False
    bias: Any = 0.0
    adds: bool = False
    residual: Any = 0.0
    tokens_first: bool = False
    partial: bool = False


def factor(weights: Any, plan: Any, scaled: bool = False, table: Any = 0.0, at: int = 0) -> Factor:
    """Describe the flat HBM tensor ``weights``, which is packed by ``plan`` (:meth:`.layout.Packing.plan`).

    ``scaled``, ``table``, ``at``: as in :class:`Factor`.
    """
    panels, columns = [], 0
    for part in plan[5]:
        panels.append(Panel(part[0], part[1], part[2], part[3]))
        columns += part[3]
    pieces, rows = [], 0
    for part in plan[6]:
        pieces.append(Piece(part[0], part[1], part[2], part[3], part[4], part[5]))
        rows += (part[1] - part[0]) * (part[3] - part[2])
    assert weights.shape[0] == rows * columns, f"packed weight has {weights.shape[0]} elements, not {rows * columns}"
    cuts = Chunks(plan[0], plan[1]), Chunks(plan[2], plan[3])
    return Factor(weights, cuts[0], cuts[1], plan[4], panels, pieces, plan[7], plan[8], plan[9], scaled, table, at)


def parts_of(d: Any, tile: Any, count: int) -> Parts:
    """Return the activation whose ``count`` chunks are the slots of one tile."""
    tiles, slots = [], []
    for c in d.static_range(count):
        tiles.append(tile)
        slots.append(c)
    return Parts(tiles, slots)


def split(d: Any, size: int, step: int) -> list[tuple[int, int]]:
    """Return ``(start, length)`` of consecutive blocks of ``step`` (0: one block); the last takes the remainder."""
    wide = step if step > 0 else size
    blocks = []
    for i in d.static_range(-(-size // wide)):
        blocks.append((i * wide, min(wide, size - i * wide)))
    return blocks


def even_runs(cut: Chunks, first: int, count: int) -> list[tuple[int, int, int]]:
    """Split ``count`` chunks from ``first`` into runs of equal width: ``(first chunk, chunks, width)``."""
    runs, run, last = [], (first, 0, 0), first + count
    for s in cut.segments:
        begin, end = max(first, s.first), min(last, s.first + s.count)
        middle = min(max(s.first + s.full, begin), end)
        for part in ((begin, middle, s.width), (middle, end, s.width - 1)):
            if part[0] < part[1]:
                if run[2] == part[2]:
                    run = (run[0], part[1] - run[0], run[2])
                else:
                    if run[1] > 0:
                        runs.append(run)
                    run = (part[0], part[1] - part[0], part[2])
    if run[1] > 0:
        runs.append(run)
    return runs


def panels_within(f: Factor, first: int, count: int) -> list[Panel]:
    """Return the panels that begin in ``count`` column chunks from ``first``."""
    panels = []
    for panel in f.panels:
        if first <= panel.first < first + count:
            panels.append(panel)
    return panels
