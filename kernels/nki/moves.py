"""Moves activations and weight panels between HBM and SBUF.

On chip, activations are transposed: [partitions, chunks, tokens] (:mod:`.layout`). The features of one matmul's result
are then on the partitions over which the next matmul contracts (the paper's implicit transposition). In HBM they are
[features, tokens], and nothing is ever transposed; or, with ``tokens_first``, [tokens, features], and the tensor engine
transposes each 128 x 128 block on its way. A DMA would transpose in rows of single elements.

``d`` is a dialect object. ``cut`` divides the features into chunks.
"""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.nki.objects import LONG_ROW, PARTITIONS, Chunks, Factor, Panel, Segment, even_runs, split

BANK = 512
"""float32 elements per partition in one PSUM bank."""


def load_rows(
    d: Any, tile: Any, x: Any, cut: Chunks, first: int, last: int, start: Any, tokens: int, tokens_first: bool = False
) -> None:
    """Load chunks [first, last) of the features of ``x``, tokens [start, start + tokens), into ``tile``.

    Dimensions: ``x`` [size, all tokens]; or with ``tokens_first`` [all tokens, size], and all chunks at once. ``tile``
    [partitions, last - first, tokens].
    """
    if x.shape[0 if tokens_first else 1] == 1 and last - first == cut.count:
        _load_token(d, tile, x, cut, tokens_first)
        return
    if tokens_first:
        for block in split(d, tokens, PARTITIONS):
            t0, t = block
            for s in cut.segments:
                row = d.sbuf((t, s.width, s.count), x.dtype)
                for run in _runs(s):
                    p0, p1, c1 = run
                    src = d.columns(x, start + t0, t, s.start + p0 * s.count, p1 - p0, s.count, c1)
                    d.load(d.at(row, ((0, t), (p0, p1), (0, c1))), src)
                for i in d.static_range(s.count):
                    c = s.first + i
                    n = cut.length(c)
                    copy_from_psum(d, d.at(tile, ((0, n), c, (t0, t0 + t))), d.transpose((n, t), row[0:t, 0:n, i]), c)
        return
    for piece in transfers(d, cut, first, last, tokens):
        p0, p1, c0, c1, feature, stride = piece
        src = d.rows(x, feature, p1 - p0, stride, c1 - c0, start, tokens)
        d.load(d.at(tile, ((p0, p1), (c0 - first, c1 - first), (0, tokens))), src)


def _load_token(d: Any, tile: Any, x: Any, cut: Chunks, tokens_first: bool) -> None:
    """Load the only token as one row and spread it over the partitions by matmuls with 1.

    A DMA's time depends on the number of rows; spread over 128 partitions, the token would be rows of a few bytes.
    """
    for s in cut.segments:
        row = d.sbuf((1, s.width, s.count), x.dtype)
        one = d.sbuf((1, 1), x.dtype)
        d.fill(one, 1.0)
        for run in _runs(s):
            p0, p1, c1 = run
            first = s.start + p0 * s.count
            if tokens_first:
                src = d.columns(x, 0, 1, first, p1 - p0, s.count, c1)
            else:
                src = d.row(x, first, p1 - p0, s.count, c1)
            d.load(d.at(row, ((0, 1), (p0, p1), (0, c1))), src)
        for block in split(d, s.count, BANK):
            c0, count = s.first + block[0], block[1]
            acc = d.psum((s.width, count, 1))
            for i in d.static_range(count):
                c = c0 + i
                n = cut.length(c)
                d.matmul(d.at(acc, ((0, n), c - c0, (0, 1))), row[0:1, 0:n, c - s.first], one[0:1, 0:1])
            for chunks in even_runs(cut, c0, count):
                c, n, wide = chunks
                d.copy(d.at(tile, ((0, wide), (c, c + n), (0, 1))), acc[0:wide, c - c0 : c - c0 + n, 0:1])


def store_rows(
    d: Any, x: Any, tile: Any, cut: Chunks, first: int, last: int, start: Any, tokens: int, tokens_first: bool = False
) -> None:
    """Store ``tile`` to ``x``: the inverse of :func:`load_rows`, with the same dimensions."""
    if tokens_first:
        for block in split(d, tokens, PARTITIONS):
            t0, t = block
            for s in cut.segments:
                row = d.sbuf((t, s.width, s.count), x.dtype)
                for i in d.static_range(s.count):
                    c = s.first + i
                    n = cut.length(c)
                    copy_from_psum(d, d.at(row, ((0, t), (0, n), i)), d.transpose((t, n), tile[0:n, c, t0 : t0 + t]), c)
                for run in _runs(s):
                    p0, p1, c1 = run
                    dst = d.columns(x, start + t0, t, s.start + p0 * s.count, p1 - p0, s.count, c1)
                    d.store(dst, row[0:t, p0:p1, 0:c1])
        return
    for piece in transfers(d, cut, first, last, tokens):
        p0, p1, c0, c1, feature, stride = piece
        dst = d.rows(x, feature, p1 - p0, stride, c1 - c0, start, tokens)
        d.store(dst, tile[p0:p1, c0 - first : c1 - first, 0:tokens])


def copy_from_psum(d: Any, dst: Any, src: Any, turn: int) -> None:
    """Copy from PSUM to SBUF; even turns use the vector engine, odd turns the scalar engine."""
    if turn % 2 == 1:
        d.copy_scalar(dst, src)
    else:
        d.copy(dst, src)


def transfers(d: Any, cut: Chunks, first: int, last: int, tokens: int) -> list[tuple[int, int, int, int, int, int]]:
    """Return the transfers of chunks [first, last) as ``(partitions from, to, chunks from, to, feature, stride)``.

    ``feature``: the first one. ``stride``: features from one partition to the next. One transfer per chunk if rows are
    long, otherwise as few per segment as the shape allows.
    """
    pieces = []
    for s in cut.segments:
        for part in _parts(d, s, max(first, s.first) - s.first, min(last, s.first + s.count) - s.first, tokens):
            p0, p1, c0, c1 = part
            pieces.append((p0, p1, s.first + c0, s.first + c1, s.start + p0 * s.count + c0, s.count))
    return pieces


def _parts(d: Any, s: Segment, first: int, last: int, tokens: int) -> list[tuple[int, int, int, int]]:
    """Return the transfers of chunks [first, last) of a segment as ``(partitions from, to, chunks from, to)``."""
    if first >= last:
        return []
    if tokens >= LONG_ROW:
        pieces = []
        for i in d.static_range(last - first):
            c = first + i
            pieces.append((0, s.width if c < s.full else s.width - 1, c, c + 1))
        return pieces
    middle = min(max(s.full, first), last)
    if middle == last or s.width == 1:
        return [(0, s.width, first, middle)]
    if middle == first:
        return [(0, s.width - 1, first, last)]
    return [(0, s.width - 1, first, last), (s.width - 1, s.width, first, middle)]


def _runs(s: Segment) -> list[tuple[int, int, int]]:
    """Return a token's features in HBM order as ``(partitions from, to, chunks)``, complete partitions first."""
    if s.full == s.count:
        return [(0, s.width, s.count)]
    return [(0, s.width - 1, s.count), (s.width - 1, s.width, s.full)]


def load_bias(d: Any, bias: Any, cut: Chunks) -> Any:
    """Load ``bias`` [size] as a float32 tile [partitions, chunks]."""
    raw = d.sbuf((cut.width, cut.count), bias.dtype)
    column = d.sbuf((cut.width, cut.count), d.float32)
    for piece in transfers(d, cut, 0, cut.count, 1):
        p0, p1, c0, c1, feature, stride = piece
        d.load(d.at(raw, ((p0, p1), (c0, c1))), d.run(bias, feature, p1 - p0, stride, c1 - c0))
    for chunks in even_runs(cut, 0, cut.count):
        c, n, wide = chunks
        d.copy(d.at(column, ((0, wide), (c, c + n))), raw[0:wide, c : c + n])
    return column


def load_panels(d: Any, f: Factor, panels: list[Panel], first: int, last: int) -> Any:
    """Load row chunks [first, last) of some panels into one tile, with one transfer per piece of each panel.

    Dimensions: result [partitions, (last - first) * columns of the panels].
    """
    cut, columns = f.rows, 0
    for panel in panels:
        columns += panel.columns
    tile = d.sbuf((cut.width, (last - first) * columns), f.weights.dtype)
    at = 0
    for panel in panels:
        wide = panel.columns
        for piece in f.pieces:
            c0, c1 = max(first, piece.first), min(last, piece.last)
            if c0 < c1:
                offset = panel.offset + (piece.offset + c0 - piece.first) * wide
                src = d.run(f.weights, offset, piece.end - piece.begin, piece.chunks * wide, (c1 - c0) * wide)
                begin, end = at + (c0 - first) * wide, at + (c1 - first) * wide
                d.load(d.at(tile, ((piece.begin, piece.end), (begin, end))), src)
        at += (last - first) * wide
    return tile
