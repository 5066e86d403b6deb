"""The stages of the low-rank kernels load a strip of tokens, multiply it by streamed weights and store the result.

A kernel calls two stages per strip: :func:`load_and_contract` (``A x``) and :func:`expand_and_store` (``B h``). Their
matmuls are those of :mod:`.matmuls`. If the input of a contraction arrives in blocks, the sums of the blocks are added
in float32. The identity block of a pivoted linear is a copy in the second stage or an addition in the first
(:func:`add_pivots`). Neither crosses partitions, as both sides are cut alike (:mod:`.forms`).

``d`` is a dialect object. Tiles are [partitions, chunks, tokens], see :mod:`.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuronmm.kernels.nki.matmuls import copy_pivots, expand, panel_matmul
from neuronmm.kernels.nki.moves import load_bias, load_panels, load_rows, store_rows
from neuronmm.kernels.nki.objects import (
    ADD,
    BIAS,
    COLUMNS,
    COPY,
    LONG_ROW,
    PARTITIONS,
    Chunks,
    Factor,
    NKIObject,
    Options,
    Panel,
    Parts,
    Sizes,
    even_runs,
    parts_of,
    split,
)
from neuronmm.kernels.nki.scaling import bias_of, multiply_by_norm


@dataclass
class Accumulation(NKIObject):  # type: ignore[misc, valid-type]
    """``A x`` of a strip, accumulated over blocks of the input features.

    ``sums``: float32 tiles with the sum of the blocks so far (empty with one block and no pivots). ``result``: tiles in
    the activation's dtype, written by the last block. Both have one tile per panel of A.
    """

    f: Factor
    sums: list[Any]
    result: list[Any]

    def parts(self, d: Any) -> Parts:
        """Return the finished result."""
        tiles, slots = [], []
        panels = self.f.panels
        for p in d.static_range(len(panels)):
            for slot in d.static_range(panels[p].last - panels[p].first):
                tiles.append(self.result[p])
                slots.append(slot)
        return Parts(tiles, slots)


def accumulate_block(
    d: Any, to: Accumulation, x: Parts, first: int, last: int, tokens: int, blocks: Sizes, dtype: Any,
    scaled: bool = False, scale: Any = None,
) -> None:  # fmt: skip
    """Add ``A x`` over row chunks [first, last), those of ``x``; ``scale`` [128, tokens] multiplies the last sum.

    In the column form the last chunks of the input are the pivots.
    """
    stored = to.f.stored
    pivoted = stored < to.f.rows.count
    if first < stored:
        _add_matmul(
            d, to, x, first, min(last, stored), last == stored and not pivoted, tokens, blocks, dtype, scaled, scale
        )
    if pivoted and last > stored:
        add_pivots(d, to, x, first, last, tokens, dtype)


def _add_matmul(
    d: Any, to: Accumulation, x: Parts, first: int, last: int, ends: bool, tokens: int, blocks: Sizes, dtype: Any,
    scaled: bool, scale: Any,
) -> None:  # fmt: skip
    """Add the matmul of ``x`` with the stored row chunks [first, last); ``ends``: the sum is then complete."""
    begins = first == 0
    panels = to.f.panels
    for block in split(d, len(panels), blocks.panels):
        p0, count = block
        tile = load_panels(d, to.f, panels[p0 : p0 + count], first, last)
        at = 0
        for i in d.static_range(count):
            p = p0 + i
            panel = panels[p]
            shape = (to.f.columns.width, panel.last - panel.first, tokens)
            if ends:
                to.result.append(d.sbuf(shape, dtype))
            elif begins:
                to.sums.append(d.sbuf(shape, d.float32))
            # the last of several blocks adds in float32 if the sum is still to be scaled
            target = to.result[p] if ends and (begins or not scaled) else to.sums[p]
            kind = (COLUMNS if ends and scaled else COPY) if begins else ADD
            other = scale if begins else to.sums[p]
            panel_matmul(
                d, target, panel.first, kind, other, tile, at, to.f, panel, x, first, last, tokens, blocks.moving
            )
            if ends and scaled and not begins:
                _scale_columns(d, to.result[p], to.sums[p], to.f.columns, panel, scale, tokens)
            at += (last - first) * panel.columns


def add_pivots(d: Any, to: Accumulation, x: Parts, first: int, last: int, tokens: int, dtype: Any) -> None:
    """Compute the result's chunks whose pivots are in [first, last): the sum of the blocks and the pivot's chunk.

    With the last pivots, compute the chunks without pivots as well: the sum alone. ``x`` is one tile.
    """
    f = to.f
    count = f.rows.count - f.stored
    for p in d.static_range(len(f.panels)):
        panel = f.panels[p]
        begin, end = max(first - f.stored, panel.first), min(last - f.stored, panel.last)
        complete = panel.last if last == f.rows.count else end
        if begin < complete and begin == panel.first:
            to.result.append(d.sbuf((f.columns.width, panel.last - panel.first, tokens), dtype))
        for run in even_runs(f.columns, begin, max(0, end - begin)):
            k, n, wide = run
            at, slot = k - panel.first, x.slots[k + f.stored - first]
            pivots = x.tiles[k + f.stored - first][0:wide, slot : slot + n, 0:tokens]
            d.add(d.at(to.result[p], ((0, wide), (at, at + n), (0, tokens))), to.sums[p][0:wide, at : at + n, 0:tokens],
                  pivots)  # fmt: skip
        begin = max(count, panel.first)
        for run in even_runs(f.columns, begin, max(0, complete - begin)):
            at, n, wide = run[0] - panel.first, run[1], run[2]
            d.copy(
                d.at(to.result[p], ((0, wide), (at, at + n), (0, tokens))), to.sums[p][0:wide, at : at + n, 0:tokens]
            )


def _scale_columns(d: Any, dst: Any, src: Any, cut: Chunks, panel: Panel, scale: Any, tokens: int) -> None:
    """Compute ``dst[:, c, i] = src[:, c, i] * scale[:, i]`` for the chunks c of a panel and tokens i."""
    for c in d.static_range(panel.last - panel.first):
        wide = cut.length(panel.first + c)
        target = d.at(dst, ((0, wide), c, (0, tokens)))
        d.multiply(target, src[0:wide, c, 0:tokens], scale[0:wide, 0:tokens])


def store_accumulated(d: Any, y: Any, h: Accumulation, start: Any, tokens: int, tokens_first: bool) -> None:
    """Store a strip's finished accumulation to ``y``; with ``tokens_first`` its tiles are first gathered into one."""
    cut = h.f.columns
    panels = h.f.panels
    if tokens_first:
        gathered = d.sbuf((cut.width, cut.count, tokens), y.dtype)
        for p in d.static_range(len(panels)):
            for chunks in even_runs(cut, panels[p].first, panels[p].last - panels[p].first):
                c, n, wide = chunks
                at = c - panels[p].first
                d.copy(d.at(gathered, ((0, wide), (c, c + n), (0, tokens))), h.result[p][0:wide, at : at + n, 0:tokens])
        store_rows(d, y, gathered, cut, 0, cut.count, start, tokens, True)
    else:
        for p in d.static_range(len(panels)):
            store_rows(d, y, h.result[p], cut, panels[p].first, panels[p].last, start, tokens)


def load_and_contract(
    d: Any, x: Any, factors: list[Factor], start: Any, tokens: int, blocks: Sizes, options: Options
) -> list[Parts]:
    """Load a strip of ``x`` once, RMS-normalise it if ``options`` ask for that, and compute ``A x`` for each factor.

    Dimensions: ``x`` in HBM, in the layout of ``options``; each result [rank, tokens] in SBUF.
    """
    cut = factors[0].rows
    accumulations = []
    for f in factors:
        accumulations.append(Accumulation(f, [], []))
    scaled = options.epsilon > 0
    assert not scaled or factors[0].stored == cut.count, "a norm's weight cannot be packed into pivots of the input"
    scale = d.sbuf((PARTITIONS, tokens), d.float32) if scaled else 0.0
    for block in split(d, cut.count, 0 if options.tokens_first else blocks.depth):
        first, count = block
        last = first + count
        strip = d.sbuf((cut.width, count, tokens), x.dtype)
        load_rows(d, strip, x, cut, first, last, start, tokens, options.tokens_first)
        if scaled:
            add_squares(d, scale, strip, cut, first, last, tokens, blocks.moving, options.epsilon, x.dtype)
            if factors[0].scaled:
                multiply_by_norm(d, strip, factors[0].table, cut, first, last, tokens)
        for accumulation in accumulations:
            parts = parts_of(d, strip, count)
            accumulate_block(d, accumulation, parts, first, last, tokens, blocks, x.dtype, scaled, scale)
    results = []
    for accumulation in accumulations:
        results.append(accumulation.parts(d))
    return results


def add_squares(
    d: Any, scale: Any, strip: Any, cut: Chunks, first: int, last: int, tokens: int, moving: int, epsilon: float,
    dtype: Any,
) -> None:  # fmt: skip
    """Add the squares of an input block to ``scale`` [128, tokens]; after the last block, turn it into ``1 / rms(x)``.

    A matmul with ones sums over the partitions, so every partition of its result has the sum. The norm's weight is
    folded into the packed factor (``pack(weight, scale)``), or multiplies the input later (:func:`.scaling.
    multiply_by_norm`), and ``scale`` is applied after the matmul with that factor.
    """
    ones = d.sbuf((PARTITIONS, PARTITIONS), dtype)
    d.fill(ones, 1.0)
    bias = d.sbuf((PARTITIONS, 1), d.float32)
    d.fill(bias, epsilon)
    for block in split(d, tokens, moving):
        t0, t = block
        acc = d.psum((PARTITIONS, t))
        for c in d.static_range(last - first):
            deep = cut.length(first + c)
            squares = d.sbuf((cut.width, t), dtype)
            d.square(d.at(squares, ((0, deep), (0, t))), strip[0:deep, c, t0 : t0 + t])
            d.matmul(d.at(acc, ((0, PARTITIONS), (0, t))), ones[0:deep, 0:PARTITIONS], squares[0:deep, 0:t])
        dst = d.at(scale, ((0, PARTITIONS), (t0, t0 + t)))
        if first == 0:
            d.copy(dst, acc)
        else:
            d.add(dst, acc, scale[0:PARTITIONS, t0 : t0 + t])
        if last == cut.count:
            d.rsqrt(dst, scale[0:PARTITIONS, t0 : t0 + t], 1.0 / cut.size, bias)


def expand_and_store(
    d: Any, y: Any, h: Parts, f: Factor, panels: list[Panel], start: Any, tokens: int, blocks: Sizes, options: Options
) -> None:
    """Compute ``y = B h`` for a strip and some panels of B, add bias and residual if present, and store it.

    If rows are long, results are stored tile by tile as weights are loaded. Otherwise, and with ``tokens_first``, one
    store takes all of them.
    """
    cut, tokens_first = f.columns, options.tokens_first
    by_panel = tokens >= LONG_ROW and not tokens_first
    kind, other = COPY, 0.0
    if options.biased:
        kind, other = BIAS, bias_of(d, f) if f.scaled else load_bias(d, options.bias, cut)
    for span in _spans(d, f, panels, blocks.panels if by_panel else 0):
        first, last = span.first, span.last
        out = d.sbuf((cut.width, last - first, tokens), y.dtype)
        if options.adds:
            extra = d.sbuf((cut.width, last - first, tokens), y.dtype)
            load_rows(d, extra, options.residual, cut, first, last, start, tokens, tokens_first)
            if not options.biased:
                kind, other = ADD, extra
        copy_pivots(d, out, first, kind, other, f, h, first, last, tokens)
        expand(d, out, first, kind, other, f, span.panels, h, tokens, blocks)
        if options.adds and options.biased:
            for chunks in even_runs(cut, first, last - first):
                j, m, wide = chunks
                at = j - first
                d.add(d.at(out, ((0, wide), (at, at + m), (0, tokens))), out[0:wide, at : at + m, 0:tokens],
                      extra[0:wide, at : at + m, 0:tokens])  # pyright: ignore[reportPossiblyUnboundVariable]  # fmt: skip
        store_rows(d, y, out, cut, first, last, start, tokens, tokens_first)


@dataclass
class Span(NKIObject):  # type: ignore[misc, valid-type]
    """Column chunks [first, last) that are stored together: those of ``panels``, and copied ones."""

    first: int
    last: int
    panels: list[Panel]


def _spans(d: Any, f: Factor, panels: list[Panel], step: int) -> list[Span]:
    """Return the spans of ``step`` panels (0: one span of everything); copied chunks have spans of their own."""
    if step == 0:
        if f.copies == 0:
            return [Span(panels[0].first, panels[len(panels) - 1].last, panels)]
        return [Span(0, f.columns.count, panels)]
    spans = []
    for block in split(d, f.copies, step * f.group):
        spans.append(Span(f.copied + block[0], f.copied + block[0] + block[1], []))
    before, after = [], []
    for panel in panels:
        if panel.first < f.copied:
            before.append(panel)
        else:
            after.append(panel)
    for part in (before, after):
        for block in split(d, len(part), step):
            streamed = part[block[0] : block[0] + block[1]]
            spans.append(Span(streamed[0].first, streamed[block[1] - 1].last, streamed))
    return spans
