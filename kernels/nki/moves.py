"""What the low-rank kernels move between HBM and SBUF: strips of activations, panels of weights.

Activations lie transposed on chip, [partitions, chunks, tokens] (:mod:`.layout`), so that the features
of one product's result lie on the partitions where the next product contracts: the paper's implicit transposition. In
HBM they are [features, tokens] as well, and nothing is ever transposed; or, on request, [tokens, features], and each
128 x 128 block is transposed on its way by the tensor engine, never by a DMA, whose rows would be single elements.

``d`` is a dialect object.
"""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.nki.objects import PARTITIONS, Chunks, Factor, Panel, even, split

BANK = 512
"""float32 elements a partition in one PSUM bank."""
LONG_ROW = 512
"""Tokens from which a chunk's rows are long enough to be moved chunk by chunk."""


def load_rows(
    d: Any, tile: Any, x: Any, cut: Chunks, first: int, last: int, start: Any, tokens: int, tokens_first: bool = False
) -> None:
    """Chunks [first, last) of the features of ``x``, tokens [start, start + tokens), into ``tile``.

    Dimensions: ``x`` [size, all tokens], or with ``tokens_first`` [all tokens, size] and all chunks at once.
    """
    if x.shape[0 if tokens_first else 1] == 1 and last - first == cut.count:
        _load_token(d, tile, x, cut, tokens_first)
        return
    if tokens_first:
        for block in split(d, tokens, PARTITIONS):
            t0, t = block
            row = d.sbuf((t, cut.width, cut.count), x.dtype)
            for run in _runs(cut):
                p0, p1, c1 = run
                src = d.columns(x, start + t0, t, p0 * cut.count, p1 - p0, cut.count, c1)
                d.load(d.at(row, ((0, t), (p0, p1), (0, c1))), src)
            for c in d.static_range(cut.count):
                n = cut.length(c)
                leave(d, d.at(tile, ((0, n), c, (t0, t0 + t))), d.transpose((n, t), row[0:t, 0:n, c]), c)
        return
    for piece in pieces(d, cut, first, last, tokens):
        p0, p1, c0, c1 = piece
        src = d.rows(x, p0 * cut.count + c0, p1 - p0, cut.count, c1 - c0, start, tokens)
        d.load(d.at(tile, ((p0, p1), (c0 - first, c1 - first), (0, tokens))), src)


def _load_token(d: Any, tile: Any, x: Any, cut: Chunks, tokens_first: bool) -> None:
    """The only token there is, as one row, which products with 1 lay over the partitions: moved to 128 partitions it
    would be rows of a few bytes, and a DMA's time goes by their number."""
    row = d.sbuf((1, cut.width, cut.count), x.dtype)
    one = d.sbuf((1, 1), x.dtype)
    d.fill(one, 1.0)
    for run in _runs(cut):
        p0, p1, c1 = run
        first = p0 * cut.count
        if tokens_first:
            src = d.columns(x, 0, 1, first, p1 - p0, cut.count, c1)
        else:
            src = d.row(x, first, p1 - p0, cut.count, c1)
        d.load(d.at(row, ((0, 1), (p0, p1), (0, c1))), src)
    for block in split(d, cut.count, BANK):
        c0, count = block
        acc = d.psum((cut.width, count, 1))
        for i in d.static_range(count):
            c = c0 + i
            n = cut.length(c)
            d.matmul(d.at(acc, ((0, n), c - c0, (0, 1))), row[0:1, 0:n, c], one[0:1, 0:1])
        for chunks in even(cut, c0, count):
            c, n, wide = chunks
            d.copy(d.at(tile, ((0, wide), (c, c + n), (0, 1))), acc[0:wide, c - c0 : c - c0 + n, 0:1])


def store_rows(
    d: Any, x: Any, tile: Any, cut: Chunks, first: int, last: int, start: Any, tokens: int, tokens_first: bool = False
) -> None:
    """The reverse of :func:`load_rows`."""
    if tokens_first:
        for block in split(d, tokens, PARTITIONS):
            t0, t = block
            row = d.sbuf((t, cut.width, cut.count), x.dtype)
            for c in d.static_range(cut.count):
                n = cut.length(c)
                leave(d, d.at(row, ((0, t), (0, n), c)), d.transpose((t, n), tile[0:n, c, t0 : t0 + t]), c)
            for run in _runs(cut):
                p0, p1, c1 = run
                dst = d.columns(x, start + t0, t, p0 * cut.count, p1 - p0, cut.count, c1)
                d.store(dst, row[0:t, p0:p1, 0:c1])
        return
    for piece in pieces(d, cut, first, last, tokens):
        p0, p1, c0, c1 = piece
        dst = d.rows(x, p0 * cut.count + c0, p1 - p0, cut.count, c1 - c0, start, tokens)
        d.store(dst, tile[p0:p1, c0 - first : c1 - first, 0:tokens])


def leave(d: Any, dst: Any, src: Any, turn: int) -> None:
    """PSUM to SBUF, on the vector and the scalar engine in turn."""
    if turn % 2 == 1:
        d.copy_scalar(dst, src)
    else:
        d.copy(dst, src)


def pieces(d: Any, cut: Chunks, first: int, last: int, tokens: int) -> list[tuple[int, int, int, int]]:
    """Transfers (partitions from, to, chunks from, to): one a chunk if rows are long, else as few as the shape lets."""
    if tokens >= LONG_ROW:
        found = []
        for i in d.static_range(last - first):
            found.append((0, cut.length(first + i), first + i, first + i + 1))
        return found
    middle = min(max(cut.full, first), last)
    if middle == last or cut.width == 1:
        return [(0, cut.width, first, middle)]
    if middle == first:
        return [(0, cut.width - 1, first, last)]
    return [(0, cut.width - 1, first, last), (cut.width - 1, cut.width, first, middle)]


def _runs(cut: Chunks) -> list[tuple[int, int, int]]:
    """A token's features in their order in HBM: (partitions from, to, chunks), whole partitions first."""
    if cut.full == cut.count:
        return [(0, cut.width, cut.count)]
    return [(0, cut.width - 1, cut.count), (cut.width - 1, cut.width, cut.full)]


def load_bias(d: Any, bias: Any, cut: Chunks) -> Any:
    """``bias`` [size] as a float32 tile [partitions, chunks]."""
    raw = d.sbuf((cut.width, cut.count), bias.dtype)
    column = d.sbuf((cut.width, cut.count), d.float32)
    for piece in pieces(d, cut, 0, cut.count, 1):
        p0, p1, c0, c1 = piece
        d.load(d.at(raw, ((p0, p1), (c0, c1))), d.run(bias, p0 * cut.count + c0, p1 - p0, cut.count, c1 - c0))
    for chunks in even(cut, 0, cut.count):
        c, n, wide = chunks
        d.copy(d.at(column, ((0, wide), (c, c + n))), raw[0:wide, c : c + n])
    return column


def load_panels(d: Any, f: Factor, panels: list[Panel], first: int, last: int) -> Any:
    """Row chunks [first, last) of some panels, one transfer each: a tile [partitions, (last - first) * columns]."""
    cut, columns = f.rows, 0
    for panel in panels:
        columns += panel.columns
    tile = d.sbuf((cut.width, (last - first) * columns), f.weights.dtype)
    at = 0
    for panel in panels:
        wide = panel.columns
        length = (last - first) * wide
        src = d.run(f.weights, panel.offset + first * wide, cut.width, cut.count * wide, length)
        d.load(d.at(tile, ((0, cut.width), (at, at + length))), src)
        at += length
    return tile
