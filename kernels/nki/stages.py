"""The steps the low-rank kernels are made of: strips of tokens, panels of weights, products, evictions.

Activations are transposed, [features, tokens], in HBM as on chip: the features of one product's result lie on the
partitions where the next product contracts, so nothing is ever transposed (the paper's implicit transposition). The
weight is stationary and the tokens move: 128 x 128 weights cost 64 cycles with one token as with 64.

``d`` is a dialect module. Tiles are [partitions, chunks, tokens], see :mod:`neuronmm.kernels.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuronmm.kernels.layout import PARTITIONS, Chunks, Packing, Panel
from neuronmm.kernels.nki.blocks import Blocks, split

BANK = 512
"""float32 elements a partition in one PSUM bank."""
LONG_ROW = 512
"""Tokens from which a chunk's rows are long enough to be moved chunk by chunk."""


@dataclass(frozen=True)
class Parts:
    """A strip's activation as tiles [partitions, up to ``per`` chunks, tokens], in the order of the chunks."""

    tiles: list[Any]
    per: int


@dataclass(frozen=True)
class Factor:
    """A packed weight in HBM and how it is packed."""

    weights: Any
    how: Packing


def factor(weights: Any, rows: int, columns: int) -> Factor:
    """The flat HBM tensor ``weights`` as the packed weight of these dimensions."""
    how = Packing.of(rows, columns, 4 if "32" in str(weights.dtype) else 2)
    assert weights.shape[0] == how.elements, f"packed weight has {weights.shape[0]} elements, not {how.elements}"
    return Factor(weights, how)


def load_rows(d: Any, tile: Any, x: Any, cut: Chunks, first: int, last: int, start: int, tokens: int) -> None:
    """Chunks [first, last) of the rows of ``x`` [size, all tokens], tokens [start, start + tokens), into ``tile``."""
    for p0, p1, c0, c1 in _pieces(cut, first, last, tokens):
        src = d.rows(x, p0 * cut.count + c0, p1 - p0, cut.count, c1 - c0, start, tokens)
        d.load(d.at(tile, (p0, p1), (c0 - first, c1 - first), (0, tokens)), src)


def store_rows(d: Any, x: Any, tile: Any, cut: Chunks, first: int, last: int, start: int, tokens: int) -> None:
    """The reverse of :func:`load_rows`."""
    for p0, p1, c0, c1 in _pieces(cut, first, last, tokens):
        dst = d.rows(x, p0 * cut.count + c0, p1 - p0, cut.count, c1 - c0, start, tokens)
        d.store(dst, tile[p0:p1, c0 - first : c1 - first, 0:tokens])


def _pieces(cut: Chunks, first: int, last: int, tokens: int) -> list[tuple[int, int, int, int]]:
    """Transfers (partitions from, to, chunks from, to): one a chunk if rows are long, else as few as the shape lets."""
    if tokens >= LONG_ROW:
        return [(0, cut.length(c), c, c + 1) for c in range(first, last)]
    middle = min(max(cut.full, first), last)
    if middle == last or cut.width == 1:
        return [(0, cut.width, first, middle)]
    if middle == first:
        return [(0, cut.width - 1, first, last)]
    return [(0, cut.width - 1, first, last), (cut.width - 1, cut.width, first, middle)]


def load_panel(d: Any, f: Factor, panel: Panel, first: int, last: int) -> Any:
    """Row chunks [first, last) of a panel: a tile [partitions, (last - first) * columns]."""
    wide, cut = panel.columns, f.how.rows
    length = (last - first) * wide
    tile = d.sbuf((cut.width, length), f.weights.dtype)
    src = d.run(f.weights, panel.offset + first * wide, cut.width, cut.count * wide, length)
    d.load(d.at(tile, (0, cut.width), (0, length)), src)
    return tile


def contract(
    d: Any, acc: Any, slot: int, tile: Any, how: Packing, panel: Panel, chunk: int, x: Parts, first: int, last: int,
    t0: int, t: int,
) -> None:  # fmt: skip
    """``acc[:, slot] += weights^T x`` for one column chunk over row chunks [first, last), wholly in PSUM.

    Dimensions: ``acc`` [columns, chunks, t]; ``tile`` holds the panel's chunks [first, last); ``x`` begins at chunk
    ``first`` and gives tokens [t0, t0 + t).
    """
    column = how.columns.start(chunk) - how.columns.start(panel.first)
    wide = how.columns.length(chunk)
    dst = d.at(acc, (0, wide), slot, (0, t))
    for c in range(last - first):
        deep = how.rows.length(first + c)
        at = c * panel.columns + column
        d.matmul(dst, tile[0:deep, at : at + wide], x.tiles[c // x.per][0:deep, c % x.per, t0 : t0 + t])


def groups(panel: Panel, tokens: int) -> list[tuple[int, int]]:
    """``(first chunk, chunks)`` of a panel whose results for ``tokens`` tokens share one PSUM bank."""
    return [(panel.first + at, n) for at, n in split(panel.last - panel.first, max(1, BANK // tokens))]


def even(cut: Chunks, first: int, count: int) -> list[tuple[int, int, int]]:
    """``(first chunk, chunks, partitions)``: a run of chunks as one or two runs of equal width."""
    middle = min(max(cut.full, first), first + count)
    runs = [(first, middle - first, cut.width), (middle, first + count - middle, cut.width - 1)]
    return [r for r in runs if r[1] and r[2]]


def evict(d: Any, dst: Any, src: Any, turn: int) -> None:
    """PSUM to SBUF, on the vector and the scalar engine in turn."""
    if turn % 2:
        d.copy_scalar(dst, src)
    else:
        d.copy(dst, src)


@dataclass
class Accumulation:
    """A product ``A x`` in the making over blocks of its contraction.

    ``sums``: float32 tiles of what the blocks so far gave (empty with one block); ``result``: the strip, in the
    activation's dtype, that the last block leaves. One tile of each for every panel of A.
    """

    f: Factor
    sums: list[Any]
    result: list[Any]

    def parts(self) -> Parts:
        return Parts(self.result, self.f.how.group)


def accumulate_block(
    d: Any, to: Accumulation, x: Parts, first: int, last: int, tokens: int, moving: int, dtype: Any,
    scaled: bool = False, scale: Any = None,
) -> None:  # fmt: skip
    """Add ``A x`` over row chunks [first, last), which ``x`` holds; ``scale`` [128, tokens] multiplies the last sum."""
    how = to.f.how
    begins, ends = first == 0, last == how.rows.count
    turn = 0
    for p, panel in enumerate(how.panels()):
        tile = load_panel(d, to.f, panel, first, last)
        shape = (how.columns.width, panel.last - panel.first, tokens)
        if ends:
            to.result.append(d.sbuf(shape, dtype))
        elif begins:
            to.sums.append(d.sbuf(shape, d.float32))
        for t0, t in split(tokens, moving):
            for j0, n in groups(panel, t):
                acc = d.psum((how.columns.width, n, t))
                for j in range(j0, j0 + n):
                    contract(d, acc, j - j0, tile, how, panel, j, x, first, last, t0, t)
                for at, m, wide in even(how.columns, j0, n):
                    slot, at = at - j0, at - panel.first
                    src = acc[0:wide, slot : slot + m, 0:t]
                    place = ((0, wide), (at, at + m), (t0, t0 + t))
                    if begins and not ends:
                        evict(d, d.at(to.sums[p], *place), src, turn)
                    elif begins and scaled:
                        _multiply_columns(d, to.result[p], at, acc, slot, m, wide, scale, t0, 0, t)
                    elif begins:
                        evict(d, d.at(to.result[p], *place), src, turn)
                    else:
                        target = to.result[p] if ends and not scaled else to.sums[p]
                        d.add(d.at(target, *place), src, to.sums[p][0:wide, at : at + m, t0 : t0 + t])
                        if ends and scaled:
                            _multiply_columns(d, to.result[p], at, to.sums[p], at, m, wide, scale, t0, t0, t)
                    turn += 1


def _multiply_columns(
    d: Any, dst: Any, at: int, src: Any, slot: int, chunks: int, wide: int, scale: Any, t0: int, s0: int, t: int
) -> None:
    """``dst[:, at + c, t0 + i] = src[:, slot + c, s0 + i] * scale[:, t0 + i]`` for some chunks c and t tokens i."""
    for c in range(chunks):
        target = d.at(dst, (0, wide), at + c, (t0, t0 + t))
        d.multiply(target, src[0:wide, slot + c, s0 : s0 + t], scale[0:wide, t0 : t0 + t])


def first_factors(
    d: Any, x: Any, factors: list[Factor], start: Any, tokens: int, blocks: Blocks, epsilon: float
) -> list[Parts]:
    """``A x`` of a strip of tokens for each factor; the input is read once and, with ``epsilon``, RMS-normalised.

    Dimensions: ``x`` [in, all tokens] in HBM; each result [rank, tokens] in SBUF.
    """
    cut = factors[0].how.rows
    products = [Accumulation(f, [], []) for f in factors]
    scale = d.sbuf((PARTITIONS, tokens), d.float32) if epsilon else 0.0
    for first, count in split(cut.count, blocks.depth):
        strip = d.sbuf((cut.width, count, tokens), x.dtype)
        load_rows(d, strip, x, cut, first, first + count, start, tokens)
        if epsilon:
            add_squares(d, scale, strip, cut, first, first + count, tokens, blocks.moving, epsilon, x.dtype)
        for product in products:
            held = Parts([strip], count)
            accumulate_block(
                d, product, held, first, first + count, tokens, blocks.moving, x.dtype, bool(epsilon), scale
            )
    return [product.parts() for product in products]


def add_squares(
    d: Any, scale: Any, strip: Any, cut: Chunks, first: int, last: int, tokens: int, moving: int, epsilon: float,
    dtype: Any,
) -> None:  # fmt: skip
    """Add the squares of a block of the input to ``scale`` [128, tokens]; after the last, make it ``1 / rms(x)``.

    The sum over partitions is a product with ones, so every partition of its result holds it. The norm's weight is
    folded into the packed factor (``pack(weight, scale)``); the scale is applied after that product.
    """
    ones = d.sbuf((PARTITIONS, PARTITIONS), dtype)
    d.fill(ones, 1.0)
    bias = d.sbuf((PARTITIONS, 1), d.float32)
    d.fill(bias, epsilon)
    for t0, t in split(tokens, moving):
        acc = d.psum((PARTITIONS, t))
        for c in range(last - first):
            deep = cut.length(first + c)
            squares = d.sbuf((cut.width, t), dtype)
            d.square(d.at(squares, (0, deep), (0, t)), strip[0:deep, c, t0 : t0 + t])
            d.matmul(d.at(acc, (0, PARTITIONS), (0, t)), ones[0:deep, 0:PARTITIONS], squares[0:deep, 0:t])
        dst = d.at(scale, (0, PARTITIONS), (t0, t0 + t))
        if first == 0:
            d.copy(dst, acc)
        else:
            d.add(dst, acc, scale[0:PARTITIONS, t0 : t0 + t])
        if last == cut.count:
            d.rsqrt(dst, scale[0:PARTITIONS, t0 : t0 + t], 1.0 / cut.size, bias)


def second_factor(
    d: Any, y: Any, h: Parts, f: Factor, panels: list[Panel], start: Any, tokens: int, moving: int, adds: bool = False,
    residual: Any = None,
) -> None:  # fmt: skip
    """``y[:, start : start + tokens] = B h`` for a strip and some panels of B; ``adds``: plus ``residual``.

    Results are stored panel by panel where rows are long, else all panels at once.
    """
    cut, rows = f.how.columns, f.how.rows
    spans = [(p, p + 1) for p in range(len(panels))] if tokens >= LONG_ROW else [(0, len(panels))]
    turn = 0
    for p0, p1 in spans:
        first, last = panels[p0].first, panels[p1 - 1].last
        out = d.sbuf((cut.width, last - first, tokens), y.dtype)
        if adds:
            extra = d.sbuf((cut.width, last - first, tokens), y.dtype)
            load_rows(d, extra, residual, cut, first, last, start, tokens)
        for panel in panels[p0:p1]:
            tile = load_panel(d, f, panel, 0, rows.count)
            for t0, t in split(tokens, moving):
                for j0, n in groups(panel, t):
                    acc = d.psum((cut.width, n, t))
                    for j in range(j0, j0 + n):
                        contract(d, acc, j - j0, tile, f.how, panel, j, h, 0, rows.count, t0, t)
                    for at, m, wide in even(cut, j0, n):
                        src = acc[0:wide, at - j0 : at - j0 + m, 0:t]
                        at = at - first
                        dst = d.at(out, (0, wide), (at, at + m), (t0, t0 + t))
                        if adds:
                            d.add(dst, src, extra[0:wide, at : at + m, t0 : t0 + t])
                        else:
                            evict(d, dst, src, turn)
                        turn += 1
        store_rows(d, y, out, cut, first, last, start, tokens)
