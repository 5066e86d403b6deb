"""What the kernels are told, as classes that every NKI compiler takes.

The compilers of NKI 0.3 to 0.6 translate a class only if it inherits from ``nki.language.NKIObject``; they know neither
properties nor class methods. ``neuronxcc.nki`` traces any class.
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
        """Elements in the chunks before this one."""
        return chunk * self.width - max(0, chunk - self.full)


@dataclass
class Panel(NKIObject):  # type: ignore[misc, valid-type]
    """Columns of a packed weight that lie together: chunks [first, last), ``columns`` wide, from element ``offset``."""

    offset: int
    first: int
    last: int
    columns: int


@dataclass
class Factor(NKIObject):  # type: ignore[misc, valid-type]
    """A packed weight in HBM and how it is packed: ``panels`` of up to ``group`` column chunks."""

    weights: Any
    rows: Chunks
    columns: Chunks
    group: int
    panels: list[Panel]


@dataclass
class Parts(NKIObject):  # type: ignore[misc, valid-type]
    """A strip's activation: for each chunk the tile [partitions, chunks, tokens] that has it, and its place there."""

    tiles: list[Any]
    slots: list[int]


@dataclass
class Sizes(NKIObject):  # type: ignore[misc, valid-type]
    """:class:`.blocks.Blocks` inside a kernel."""

    tokens: int
    moving: int
    depth: int
    intermediate: int
    panels: int


@dataclass
class Options(NKIObject):  # type: ignore[misc, valid-type]
    """What a kernel does besides its products.

    ``epsilon``: the input is RMS-normalised first (the norm's weight is packed into the factors that read it); 0: not.
    ``biased`` and ``adds``: ``bias`` [out] and ``residual`` (like the output) are added to the result.
    ``tokens_first``: activations in HBM are [tokens, features] and not [features, tokens].
    ``partial``: the MLP's output is what B of down is applied to, the down projection's rank: a tensor-parallel host
    sums that over the cores, which is less than the hidden size, and applies B itself.
    """

    epsilon: float = 0.0
    biased: bool = False
    bias: Any = 0.0
    adds: bool = False
    residual: Any = 0.0
    tokens_first: bool = False
    partial: bool = False


def factor(weights: Any, plan: tuple[int, int, int, tuple[tuple[int, int, int, int], ...]]) -> Factor:
    """The flat HBM tensor ``weights``, packed as ``plan`` says (:func:`.choice.factor_plan`)."""
    rows, columns = Chunks(plan[0]), Chunks(plan[1])
    elements = rows.width * rows.count * columns.size
    assert weights.shape[0] == elements, f"packed weight has {weights.shape[0]} elements, not {elements}"
    panels = []
    for part in plan[3]:
        panels.append(Panel(part[0], part[1], part[2], part[3]))
    return Factor(weights, rows, columns, plan[2], panels)


def in_one(d: Any, tile: Any, count: int) -> Parts:
    """``count`` chunks of an activation in one tile."""
    tiles, slots = [], []
    for c in d.static_range(count):
        tiles.append(tile)
        slots.append(c)
    return Parts(tiles, slots)


def split(d: Any, size: int, step: int) -> list[tuple[int, int]]:
    """``(start, length)`` of consecutive blocks of ``step`` (0: one block); the last is what remains."""
    wide = step if step > 0 else size
    blocks = []
    for i in d.static_range(-(-size // wide)):
        blocks.append((i * wide, min(wide, size - i * wide)))
    return blocks


def even(cut: Chunks, first: int, count: int) -> list[tuple[int, int, int]]:
    """``(first chunk, chunks, partitions)``: a run of chunks as one or two runs of equal width."""
    middle = min(max(cut.full, first), first + count)
    runs = []
    if middle > first:
        runs.append((first, middle - first, cut.width))
    if first + count > middle:
        runs.append((middle, first + count - middle, cut.width - 1))
    return runs


def panels_within(f: Factor, first: int, count: int) -> list[Panel]:
    """The panels that begin in ``count`` column chunks from ``first``."""
    some = []
    for panel in f.panels:
        if first <= panel.first < first + count:
            some.append(panel)
    return some
