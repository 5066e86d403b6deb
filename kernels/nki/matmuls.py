"""Matmuls of a strip of tokens with panels of weights, and the evictions of their results.

The functions go from one PSUM tile (:func:`contract`) up to a streamed weight (:func:`expand`). The weight is the
stationary operand and the tokens move: a 128 x 128 weight block costs 64 cycles for any number of tokens from 1 to 64.
Every contraction accumulates in PSUM. :func:`copy_pivots` takes the place of the matmuls of an identity block.

``d`` is a dialect object. Tiles are [partitions, chunks, tokens], see :mod:`.layout`. ``wide`` and ``deep`` are the
partitions of a column chunk and of a row chunk.
"""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.nki.moves import BANK, copy_from_psum, load_panels
from neuronmm.kernels.nki.objects import (
    ADD,
    BIAS,
    COLUMNS,
    MULTIPLY,
    SILU,
    Factor,
    Panel,
    Parts,
    Sizes,
    even_runs,
    split,
)
from neuronmm.kernels.nki.scaling import evict_scaled


def contract(
    d: Any, acc: Any, slot: int, tile: Any, at: int, f: Factor, panel: Panel, chunk: int, x: Parts, first: int,
    last: int, t0: int, t: int,
) -> None:  # fmt: skip
    """Compute ``acc[:, slot] += weights^T x`` for one column chunk over row chunks [first, last), in PSUM.

    Dimensions: ``acc`` [columns, chunks, t]; ``tile`` has the panel's chunks [first, last) from element ``at`` on;
    ``x`` begins at chunk ``first``, of which tokens [t0, t0 + t) are used.
    """
    column = at + f.columns.start(chunk) - f.columns.start(panel.first)
    wide = f.columns.length(chunk)
    dst = d.at(acc, ((0, wide), slot, (0, t)))
    for c in d.static_range(last - first):
        deep = f.rows.length(first + c)
        at = c * panel.columns + column
        d.matmul(dst, tile[0:deep, at : at + wide], x.tiles[c][0:deep, x.slots[c], t0 : t0 + t])


def groups(d: Any, panel: Panel, tokens: int) -> list[tuple[int, int]]:
    """Split a panel's chunks into runs whose results for ``tokens`` tokens share a PSUM bank: ``(first, chunks)``."""
    runs = []
    for block in split(d, panel.last - panel.first, max(1, BANK // tokens)):
        runs.append((panel.first + block[0], block[1]))
    return runs


def evict(
    d: Any, kind: str, out: Any, at: int, acc: Any, slot: int, chunks: int, wide: int, t0: int, t: int, other: Any,
    column: int, turn: int,
) -> None:  # fmt: skip
    """Move ``chunks`` column chunks from ``slot`` of ``acc`` to ``at`` of ``out``, tokens [t0, t0 + t).

    ``kind`` and ``other``: see :data:`.objects.COPY`. ``column``: index of the first chunk in the weight. Plain copies
    alternate between the vector and the scalar engine by ``turn``.
    """
    dst = d.at(out, ((0, wide), (at, at + chunks), (t0, t0 + t)))
    src = acc[0:wide, slot : slot + chunks, 0:t]
    if kind == SILU:
        d.silu(dst, src)
    elif kind == ADD:
        d.add(dst, src, other[0:wide, at : at + chunks, t0 : t0 + t])
    elif kind == MULTIPLY:
        d.multiply(dst, src, other[0:wide, at : at + chunks, t0 : t0 + t])
    elif kind == COLUMNS:
        for c in d.static_range(chunks):
            one = d.at(out, ((0, wide), at + c, (t0, t0 + t)))
            d.multiply(one, acc[0:wide, slot + c, 0:t], other[0:wide, t0 : t0 + t])
    elif kind == BIAS:
        for c in d.static_range(chunks):
            one = d.at(out, ((0, wide), at + c, (t0, t0 + t)))
            d.add_column(one, acc[0:wide, slot + c, 0:t], other[0:wide, column + c : column + c + 1])
    else:
        copy_from_psum(d, dst, src, turn)


def panel_matmul(
    d: Any, out: Any, base: int, kind: str, other: Any, tile: Any, at: int, f: Factor, panel: Panel, x: Parts,
    first: int, last: int, tokens: int, moving: int,
) -> None:  # fmt: skip
    """Compute ``out = weights^T x`` for one panel over row chunks [first, last).

    Dimensions: ``out`` [columns, chunks, tokens] from column chunk ``base`` on; ``x`` and ``tile`` (from ``at`` on)
    have row chunks [first, last); ``other`` as ``kind`` requires.
    """
    cut = f.columns
    for group in groups(d, panel, min(moving, tokens)):
        j0, n = group
        for block in split(d, tokens, moving):
            t0, t = block
            acc = d.psum((cut.width, n, t))
            for i in d.static_range(n):
                contract(d, acc, i, tile, at, f, panel, j0 + i, x, first, last, t0, t)
            turn = j0 // n + t0 // moving
            for chunks in even_runs(cut, j0, n):
                j, m, wide = chunks
                if f.scaled:
                    evict_scaled(d, kind, out, j - base, acc, j - j0, m, wide, t0, t, other, j, turn, f)
                else:
                    evict(d, kind, out, j - base, acc, j - j0, m, wide, t0, t, other, j, turn)


def expand(
    d: Any, out: Any, base: int, kind: str, other: Any, f: Factor, panels: list[Panel], h: Parts, tokens: int,
    blocks: Sizes,
) -> None:  # fmt: skip
    """Compute ``out = B h`` for some panels of B, streaming them from HBM; arguments as in :func:`panel_matmul`."""
    rows = f.rows.count
    for block in split(d, len(panels), blocks.panels):
        p0, count = block
        tile = load_panels(d, f, panels[p0 : p0 + count], 0, rows)
        at = 0
        for panel in panels[p0 : p0 + count]:
            panel_matmul(d, out, base, kind, other, tile, at, f, panel, h, 0, rows, tokens, blocks.moving)
            at += rows * panel.columns


def copy_pivots(
    d: Any, out: Any, base: int, kind: str, other: Any, f: Factor, h: Parts, first: int, last: int, tokens: int
) -> None:
    """Move ``h`` to the copied chunks of ``out`` in [first, last); ``kind`` and ``other`` as in :func:`evict`.

    Dimensions: ``out`` [columns, chunks, tokens] from column chunk ``base`` on, ``h`` [rank, tokens].
    """
    begin, end = max(first, f.copied), min(last, f.copied + f.copies)
    for run in even_runs(f.columns, begin, max(0, end - begin)):
        start, stop, wide = run[0], run[0] + run[1], run[2]
        for i in d.static_range(run[1]):
            c = run[0] + i + 1
            # slot 0 begins another tile of h
            if c == stop or h.slots[c - f.copied] == 0:
                k = start - f.copied
                evict(d, kind, out, start - base, h.tiles[k], h.slots[k], c - start, wide, 0, tokens, other, start, k)
                start = c
