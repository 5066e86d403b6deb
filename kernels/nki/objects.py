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


class Chunks(NKIObject):  # type: ignore[misc, valid-type]
    """A dimension of ``size`` cut into ``count`` chunks of at most 128 partitions.

    ``width``: partitions of the widest chunk. ``full``: chunks of that width; the others have one partition less.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = -(-size // PARTITIONS)
        self.width = -(-size // self.count)
        self.full = size - (self.width - 1) * self.count

    def length(self, chunk: int) -> int:
        """Partitions of one chunk."""
        return self.width if chunk < self.full else self.width - 1

    def start(self, chunk: int) -> int:
        """Return elements in the chunks before this one."""
        return chunk * self.width - max(0, chunk - self.full)


@dataclass
class Panel(NKIObject):  # type: ignore[misc, valid-type]
    """Consecutive column chunks [first, last) of a packed weight: ``columns`` columns, from element ``offset``."""

    offset: int
    first: int
    last: int
    columns: int


@dataclass
class Factor(NKIObject):  # type: ignore[misc, valid-type]
    """A packed weight in HBM and how it is packed: ``panels`` of up to ``group`` column chunks.

    Dimensions: ``weights`` flat; ``rows`` are the weight's input features, ``columns`` its output features.
    """

    weights: Any
    rows: Chunks
    columns: Chunks
    group: int
    panels: list[Panel]


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

    ``epsilon``: above 0 the kernel RMS-normalises its input. The norm's weight is packed into the factors that read it.
    ``biased``, ``adds``: the kernel adds ``bias`` [out], or ``residual`` (shaped like the output), to the result.
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


def factor(weights: Any, plan: tuple[int, int, int, tuple[tuple[int, int, int, int], ...]]) -> Factor:
    """Describe the flat HBM tensor ``weights``, which is packed by ``plan`` (:func:`.choice.factor_plan`)."""
    rows, columns = Chunks(plan[0]), Chunks(plan[1])
    elements = rows.width * rows.count * columns.size
    assert weights.shape[0] == elements, f"packed weight has {weights.shape[0]} elements, not {elements}"
    panels = []
    for part in plan[3]:
        panels.append(Panel(part[0], part[1], part[2], part[3]))
    return Factor(weights, rows, columns, plan[2], panels)


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
    """Split ``count`` chunks from ``first`` into one or two runs of equal width: ``(first chunk, chunks, width)``."""
    middle = min(max(cut.full, first), first + count)
    runs = []
    if middle > first:
        runs.append((first, middle - first, cut.width))
    if first + count > middle:
        runs.append((middle, first + count - middle, cut.width - 1))
    return runs


def panels_within(f: Factor, first: int, count: int) -> list[Panel]:
    """Return the panels that begin in ``count`` column chunks from ``first``."""
    panels = []
    for panel in f.panels:
        if first <= panel.first < first + count:
            panels.append(panel)
    return panels
