"""The steps the low-rank kernels are made of: strips of tokens, panels of weights, products, evictions.

Activations are transposed, [features, tokens], in HBM as on chip: the features of one product's result lie on the
partitions where the next product contracts, so nothing is ever transposed (the paper's implicit transposition). The
weight is stationary and the tokens move: 128 x 128 weights cost 64 cycles with one token as with 64.

``d`` is a dialect module. Tiles are [partitions, chunks, tokens], see :mod:`neuronmm.kernels.layout`.
"""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.layout import PARTITIONS, Chunks, Packing, Panel
from neuronmm.kernels.nki.blocks import split

BANK = 512
"""float32 elements a partition in one PSUM bank."""
LONG_ROW = 512
"""Tokens from which a chunk's rows are long enough to be moved chunk by chunk."""


def packing(weights: Any, rows: int, columns: int) -> Packing:
    """The packing of a flat HBM tensor that holds a weight of these dimensions."""
    found = Packing.of(rows, columns, 4 if "32" in str(weights.dtype) else 2)
    assert weights.shape[0] == found.elements, f"packed weight has {weights.shape[0]} elements, not {found.elements}"
    return found


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


def load_panel(d: Any, weights: Any, how: Packing, panel: Panel, first: int, last: int) -> Any:
    """Row chunks [first, last) of a panel: a tile [partitions, (last - first) * columns]."""
    wide, cut = panel.columns, how.rows
    tile = d.sbuf((cut.width, (last - first) * wide), weights.dtype)
    offset = panel.offset + first * wide
    src = d.run(weights, offset, cut.width, cut.count * wide, (last - first) * wide)
    d.load(d.at(tile, (0, cut.width), (0, (last - first) * wide)), src)
    return tile


def contract(
    d: Any,
    dst: Any,
    tile: Any,
    how: Packing,
    panel: Panel,
    chunk: int,
    moving: Any,
    first: int,
    last: int,
    t0: int,
    t1: int,
) -> None:
    """``dst += weights^T moving`` for one column chunk over row chunks [first, last), wholly in PSUM.

    Dimensions: ``dst`` [chunk's columns, t1 - t0]; ``moving`` [partitions, last - first, tokens].
    """
    column = how.columns.start(chunk) - how.columns.start(panel.first)
    wide = how.columns.length(chunk)
    for c in range(first, last):
        deep = how.rows.length(c)
        at = (c - first) * panel.columns + column
        d.matmul(dst, tile[0:deep, at : at + wide], moving[0:deep, c - first, t0:t1])


def groups(panel: Panel, tokens: int) -> list[tuple[int, int]]:
    """``(first chunk, chunks)`` of a panel whose results for ``tokens`` tokens share one PSUM bank."""
    return [(panel.first + at, n) for at, n in split(panel.last - panel.first, max(1, BANK // tokens))]


def evict(d: Any, dst: Any, src: Any, turn: int) -> None:
    """PSUM to SBUF, on the vector and the scalar engine in turn."""
    if turn % 2:
        d.copy_scalar(dst, src)
    else:
        d.copy(dst, src)


def even(cut: Chunks, first: int, count: int) -> list[tuple[int, int, int]]:
    """``(first chunk, chunks, partitions)``: a run of chunks as one or two runs of equal width."""
    middle = min(max(cut.full, first), first + count)
    runs = [(first, middle - first, cut.width), (middle, first + count - middle, cut.width - 1)]
    return [r for r in runs if r[1] and r[2]]


def first_factor(
    d: Any, x: Any, weights: Any, how: Packing, tokens: int, moving: int, dtype: Any, scale: Any = None
) -> Any:
    """``A x`` for a strip, [rank partitions, rank chunks, tokens]; ``scale`` [128, tokens] multiplies its columns."""
    h = d.sbuf((how.columns.width, how.columns.count, tokens), dtype)
    turn = 0
    for panel in how.panels():
        tile = load_panel(d, weights, how, panel, 0, how.rows.count)
        for t0, t in split(tokens, moving):
            for j0, n in groups(panel, t):
                acc = d.psum((how.columns.width, n, t))
                for j in range(j0, j0 + n):
                    wide = how.columns.length(j)
                    dst = d.at(acc, (0, wide), j - j0, (0, t))
                    contract(d, dst, tile, how, panel, j, x, 0, how.rows.count, t0, t0 + t)
                    if scale is not None:
                        dst = d.at(h, (0, wide), j, (t0, t0 + t))
                        d.multiply(dst, acc[0:wide, j - j0, 0:t], scale[0:wide, t0 : t0 + t])
                if scale is None:
                    for at, m, wide in even(how.columns, j0, n):
                        src = acc[0:wide, at - j0 : at - j0 + m, 0:t]
                        evict(d, d.at(h, (0, wide), (at, at + m), (t0, t0 + t)), src, turn)
                        turn += 1
    return h


def second_factor(
    d: Any, y: Any, h: Any, weights: Any, how: Packing, start: Any, tokens: int, moving: int, residual: Any = None,
    panels: list[Panel] | None = None,
) -> None:  # fmt: skip
    """``y[:, start : start + tokens] = B h (+ residual)`` for a strip, stored panel by panel (short rows: at the end).

    ``panels`` limits it to some panels of B.
    """
    cut = how.columns
    gather = tokens < LONG_ROW and panels is None
    out = extra = None
    if gather:
        out, extra = _out_tiles(d, y, cut, 0, cut.count, start, tokens, residual)
    turn = 0
    for panel in panels or how.panels():
        tile = load_panel(d, weights, how, panel, 0, how.rows.count)
        base = 0 if gather else panel.first
        if not gather:
            out, extra = _out_tiles(d, y, cut, panel.first, panel.last, start, tokens, residual)
        for t0, t in split(tokens, moving):
            for j0, n in groups(panel, t):
                acc = d.psum((cut.width, n, t))
                for j in range(j0, j0 + n):
                    dst = d.at(acc, (0, cut.length(j)), j - j0, (0, t))
                    contract(d, dst, tile, how, panel, j, h, 0, how.rows.count, t0, t0 + t)
                for at, m, wide in even(cut, j0, n):
                    dst = d.at(out, (0, wide), (at - base, at - base + m), (t0, t0 + t))
                    src = acc[0:wide, at - j0 : at - j0 + m, 0:t]
                    if extra is None:
                        evict(d, dst, src, turn)
                    else:
                        d.add(dst, src, extra[0:wide, at - base : at - base + m, t0 : t0 + t])
                    turn += 1
        if not gather:
            store_rows(d, y, out, cut, panel.first, panel.last, start, tokens)
    if gather:
        store_rows(d, y, out, cut, 0, cut.count, start, tokens)


def _out_tiles(
    d: Any, y: Any, cut: Chunks, first: int, last: int, start: int, tokens: int, residual: Any
) -> tuple[Any, Any]:
    out = d.sbuf((cut.width, last - first, tokens), y.dtype)
    if residual is None:
        return out, None
    extra = d.sbuf((cut.width, last - first, tokens), residual.dtype)
    load_rows(d, extra, residual, cut, first, last, start, tokens)
    return out, extra


def rms_scale(d: Any, x: Any, cut: Chunks, tokens: int, moving: int, epsilon: float, dtype: Any) -> Any:
    """``1 / rms(x)`` of each token, on all partitions: a float32 tile [128, tokens].

    The sum of squares over partitions is a product with ones, so every partition of its result holds it; the norm's
    weight is folded into the packed factor (``pack(weight, scale)``), and the scale is applied after that product.
    """
    scale = d.sbuf((PARTITIONS, tokens), d.float32)
    ones = d.sbuf((PARTITIONS, PARTITIONS), dtype)
    bias = d.sbuf((PARTITIONS, 1), d.float32)
    d.fill(ones, 1.0)
    d.fill(bias, epsilon)
    for t0, t in split(tokens, moving):
        acc = d.psum((PARTITIONS, t))
        for c in range(cut.count):
            deep = cut.length(c)
            squares = d.sbuf((cut.width, t), dtype)
            d.square(d.at(squares, (0, deep), (0, t)), x[0:deep, c, t0 : t0 + t])
            d.matmul(d.at(acc, (0, PARTITIONS), (0, t)), ones[0:deep, 0:PARTITIONS], squares[0:deep, 0:t])
        dst = d.at(scale, (0, PARTITIONS), (t0, t0 + t))
        d.rsqrt(dst, acc[0:PARTITIONS, 0:t], 1.0 / cut.size, bias)
    return scale
