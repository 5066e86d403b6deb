"""The steps the low-rank kernels are made of: products of a strip of tokens with panels of weights, and evictions.

The weight is stationary and the tokens move: 128 x 128 weights cost 64 cycles with one token as with 64. Every
contraction accumulates in PSUM; where its input comes in blocks, the blocks' sums add up in float32.

``d`` is a dialect object. Tiles are [partitions, chunks, tokens], see :mod:`.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuronmm.kernels.nki.moves import BANK, LONG_ROW, leave, load_bias, load_panels, load_rows, store_rows
from neuronmm.kernels.nki.objects import (
    PARTITIONS,
    Chunks,
    Factor,
    NKIObject,
    Options,
    Panel,
    Parts,
    Sizes,
    even,
    in_one,
    split,
)

COPY, ADD, SILU, MULTIPLY, COLUMNS, BIAS = "copy", "add", "silu", "multiply", "columns", "bias"
"""How a product leaves PSUM: as it is; plus, or times, another tile of its shape; through SiLU; times one number a
token, [128, tokens]; plus one number a feature, [partitions, chunks]."""


def contract(
    d: Any, acc: Any, slot: int, tile: Any, at: int, f: Factor, panel: Panel, chunk: int, x: Parts, first: int,
    last: int, t0: int, t: int,
) -> None:  # fmt: skip
    """``acc[:, slot] += weights^T x`` for one column chunk over row chunks [first, last), wholly in PSUM.

    Dimensions: ``acc`` [columns, chunks, t]; ``tile`` holds the panel's chunks [first, last) from element ``at``;
    ``x`` begins at chunk ``first`` and gives tokens [t0, t0 + t).
    """
    column = at + f.columns.start(chunk) - f.columns.start(panel.first)
    wide = f.columns.length(chunk)
    dst = d.at(acc, ((0, wide), slot, (0, t)))
    for c in d.static_range(last - first):
        deep = f.rows.length(first + c)
        at = c * panel.columns + column
        d.matmul(dst, tile[0:deep, at : at + wide], x.tiles[c][0:deep, x.slots[c], t0 : t0 + t])


def groups(d: Any, panel: Panel, tokens: int) -> list[tuple[int, int]]:
    """``(first chunk, chunks)`` of a panel whose results for ``tokens`` tokens share one PSUM bank."""
    found = []
    for block in split(d, panel.last - panel.first, max(1, BANK // tokens)):
        found.append((panel.first + block[0], block[1]))
    return found


def evict(
    d: Any, kind: str, out: Any, at: int, acc: Any, slot: int, chunks: int, wide: int, t0: int, t: int, other: Any,
    column: int, turn: int,
) -> None:  # fmt: skip
    """Column chunks from ``slot`` of ``acc`` to those from ``at`` of ``out``, tokens [t0, t0 + t); ``column``: which
    chunks of the weight they are. Plain copies go to the vector and the scalar engine in turn."""
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
        leave(d, dst, src, turn)


def panel_product(
    d: Any, out: Any, base: int, kind: str, other: Any, tile: Any, at: int, f: Factor, panel: Panel, x: Parts,
    first: int, last: int, tokens: int, moving: int,
) -> None:  # fmt: skip
    """``out = weights^T x`` for one panel, over row chunks [first, last), which ``x`` and ``tile`` (from ``at``) hold.

    Dimensions: ``out`` [columns, chunks, tokens] from column chunk ``base`` on; ``other`` as ``kind`` asks.
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
            for chunks in even(cut, j0, n):
                j, m, wide = chunks
                evict(d, kind, out, j - base, acc, j - j0, m, wide, t0, t, other, j, turn)


def expand(
    d: Any, out: Any, base: int, kind: str, other: Any, f: Factor, panels: list[Panel], h: Parts, tokens: int,
    blocks: Sizes,
) -> None:  # fmt: skip
    """``out = B h`` for some panels of B, streamed; arguments as in :func:`panel_product`."""
    rows = f.rows.count
    for block in split(d, len(panels), blocks.panels):
        p0, count = block
        tile = load_panels(d, f, panels[p0 : p0 + count], 0, rows)
        at = 0
        for panel in panels[p0 : p0 + count]:
            panel_product(d, out, base, kind, other, tile, at, f, panel, h, 0, rows, tokens, blocks.moving)
            at += rows * panel.columns


@dataclass
class Accumulation(NKIObject):  # type: ignore[misc, valid-type]
    """A product ``A x`` in the making over blocks of its contraction.

    ``sums``: float32 tiles of what the blocks so far gave (empty with one block); ``result``: the strip, in the
    activation's dtype, that the last block leaves. One tile of each for every panel of A.
    """

    f: Factor
    sums: list[Any]
    result: list[Any]

    def parts(self, d: Any) -> Parts:
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
    """Add ``A x`` over row chunks [first, last), which ``x`` holds; ``scale`` [128, tokens] multiplies the last sum."""
    begins, ends = first == 0, last == to.f.rows.count
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
            # the last of several blocks, if it is to be scaled, adds in float32 first
            target = to.result[p] if ends and (begins or not scaled) else to.sums[p]
            kind = (COLUMNS if ends and scaled else COPY) if begins else ADD
            other = scale if begins else to.sums[p]
            panel_product(
                d, target, panel.first, kind, other, tile, at, to.f, panel, x, first, last, tokens, blocks.moving
            )
            if ends and scaled and not begins:
                _scale_columns(d, to.result[p], to.sums[p], to.f.columns, panel, scale, tokens)
            at += (last - first) * panel.columns


def _scale_columns(d: Any, dst: Any, src: Any, cut: Chunks, panel: Panel, scale: Any, tokens: int) -> None:
    """``dst[:, c, i] = src[:, c, i] * scale[:, i]`` for the chunks c of a panel and tokens i."""
    for c in d.static_range(panel.last - panel.first):
        wide = cut.length(panel.first + c)
        target = d.at(dst, ((0, wide), c, (0, tokens)))
        d.multiply(target, src[0:wide, c, 0:tokens], scale[0:wide, 0:tokens])


def store_parts(d: Any, y: Any, made: Accumulation, start: Any, tokens: int, tokens_first: bool) -> None:
    """A finished accumulation of a strip to HBM; where tokens come first its tiles are gathered into one."""
    cut = made.f.columns
    panels = made.f.panels
    if tokens_first:
        whole = d.sbuf((cut.width, cut.count, tokens), y.dtype)
        for p in d.static_range(len(panels)):
            for chunks in even(cut, panels[p].first, panels[p].last - panels[p].first):
                c, n, wide = chunks
                at = c - panels[p].first
                d.copy(d.at(whole, ((0, wide), (c, c + n), (0, tokens))), made.result[p][0:wide, at : at + n, 0:tokens])
        store_rows(d, y, whole, cut, 0, cut.count, start, tokens, True)
    else:
        for p in d.static_range(len(panels)):
            store_rows(d, y, made.result[p], cut, panels[p].first, panels[p].last, start, tokens)


def first_factors(
    d: Any, x: Any, factors: list[Factor], start: Any, tokens: int, blocks: Sizes, options: Options
) -> list[Parts]:
    """``A x`` of a strip of tokens for each factor; the input is read once and, if asked, RMS-normalised.

    Dimensions: ``x`` in HBM as ``options`` say; each result [rank, tokens] in SBUF.
    """
    cut = factors[0].rows
    products = []
    for f in factors:
        products.append(Accumulation(f, [], []))
    scaled = options.epsilon > 0
    scale = d.sbuf((PARTITIONS, tokens), d.float32) if scaled else 0.0
    for block in split(d, cut.count, 0 if options.tokens_first else blocks.depth):
        first, count = block
        last = first + count
        strip = d.sbuf((cut.width, count, tokens), x.dtype)
        load_rows(d, strip, x, cut, first, last, start, tokens, options.tokens_first)
        if scaled:
            add_squares(d, scale, strip, cut, first, last, tokens, blocks.moving, options.epsilon, x.dtype)
        for product in products:
            held = in_one(d, strip, count)
            accumulate_block(d, product, held, first, last, tokens, blocks, x.dtype, scaled, scale)
    made = []
    for product in products:
        made.append(product.parts(d))
    return made


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


def second_factor(
    d: Any, y: Any, h: Parts, f: Factor, panels: list[Panel], start: Any, tokens: int, blocks: Sizes, options: Options
) -> None:
    """``y = B h`` for a strip and some panels of B, plus bias and residual if asked.

    Results are stored as weights are loaded where rows are long; else, and where tokens come first, all at once.
    """
    cut, first_tokens = f.columns, options.tokens_first
    by_panel = tokens >= LONG_ROW and not first_tokens
    spans = split(d, len(panels), blocks.panels if by_panel else 0)
    kind, other = COPY, 0.0
    if options.biased:
        kind, other = BIAS, load_bias(d, options.bias, cut)
    for span in spans:
        p0, count = span
        some = panels[p0 : p0 + count]
        first, last = some[0].first, some[count - 1].last
        out = d.sbuf((cut.width, last - first, tokens), y.dtype)
        if options.adds:
            extra = d.sbuf((cut.width, last - first, tokens), y.dtype)
            load_rows(d, extra, options.residual, cut, first, last, start, tokens, first_tokens)
            if not options.biased:
                kind, other = ADD, extra
        expand(d, out, first, kind, other, f, some, h, tokens, blocks)
        if options.adds and options.biased:
            for chunks in even(cut, first, last - first):
                j, m, wide = chunks
                at = j - first
                d.add(d.at(out, ((0, wide), (at, at + m), (0, tokens))), out[0:wide, at : at + m, 0:tokens],
                      extra[0:wide, at : at + m, 0:tokens])  # pyright: ignore[reportPossiblyUnboundVariable]  # fmt: skip
        store_rows(d, y, out, cut, first, last, start, tokens, first_tokens)
