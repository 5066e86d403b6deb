"""``y = B (A x)`` in one kernel (the paper's XUV, arXiv 2510.25977), and ``y = W x`` with one packed weight.

The weights are packed by :func:`.layout.pack`. :mod:`.low_rank_matmul_torch` computes the same in torch.
"""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.nki.moves import load_rows
from neuronmm.kernels.nki.objects import Factor, Options, Sizes, parts_of
from neuronmm.kernels.nki.scaling import load_table, resident
from neuronmm.kernels.nki.stages import expand_and_store, load_and_contract

STRIP = 512
"""Tokens per strip, and per matmul instruction, of :func:`packed_matmul`."""


def low_rank_matmul(d: Any, x: Any, a: Factor, b: Factor, y: Any, blocks: Sizes, options: Options) -> None:
    """Compute ``y = B (A x)`` (+ bias) (+ residual) on the dialect ``d``.

    Dimensions:
        in, rank, out: features of x, of A x and of y
        x: [in, tokens]; [tokens, in] with ``options.tokens_first``
        y, residual: [out, tokens]; [tokens, out] with ``options.tokens_first``
        a, b: packed weights [rank, in] and [out, rank]; a norm's weight is packed into a, or in their table

    The rank-r intermediate ``h`` never leaves SBUF. Each weight is read once per strip: once in all for up to 128
    tokens (decode), which are one strip, and once per ``blocks.tokens`` tokens for more (prefill).

    Pseudocode::

        for each strip of blocks.tokens tokens:             # a loop of the language; the loops below are unrolled
            for each block of blocks.depth chunks of x:     # load_and_contract
                DMA: x block -> SBUF
                tensor, scalar, vector: 1 / rms(x), if normalised
                for each tile of blocks.panels panels of A:
                    DMA: A tile -> SBUF, double-buffered
                    tensor: PSUM = A x, blocks.moving tokens per instruction
                    vector or scalar: h += PSUM in float32; the last block scales it and rounds once
            for each tile of blocks.panels panels of B:     # expand_and_store
                DMA: B tile -> SBUF, double-buffered
                tensor: PSUM = B h, over the whole rank
                vector or scalar: y = PSUM (+ bias) (+ residual)
                DMA: y -> HBM, with short rows once per strip
    """
    if options.tokens_first:
        d.prepare_transposes(x.dtype)
    table = load_table(d, a)
    a, b = resident(a, table), resident(b, table)
    strips, tail = divmod(x.shape[0 if options.tokens_first else 1], blocks.tokens)
    for i in d.loop(strips):
        _strip(d, x, a, b, y, i * blocks.tokens, blocks.tokens, blocks, options)
    if tail > 0:
        _strip(d, x, a, b, y, strips * blocks.tokens, tail, blocks, options)


def _strip(
    d: Any, x: Any, a: Factor, b: Factor, y: Any, start: Any, tokens: int, blocks: Sizes, options: Options
) -> None:
    h = load_and_contract(d, x, [a], start, tokens, blocks, options)
    expand_and_store(d, y, h[0], b, b.panels, start, tokens, blocks, options)


def packed_matmul(d: Any, x: Any, w: Factor, y: Any, options: Options) -> None:
    """Compute ``y = W x`` on the dialect ``d``.

    Dimensions:
        in, out: features of x and of y
        x: [in, tokens]; [tokens, in] with ``options.tokens_first``
        y: [out, tokens]; [tokens, out] with ``options.tokens_first``
        w: packed weight [out, in]

    This is half of a low-rank matmul, for hosts that sum over the cores between the halves. All input features of a
    strip are in SBUF at once, and every panel of W is read once per strip.

    Pseudocode::

        for each strip of STRIP tokens:           # a loop of the language; the loops below are unrolled
            DMA: x strip -> SBUF
            for each panel of W:
                DMA: W panel -> SBUF, double-buffered
                tensor: PSUM = W x, over all of in
                vector or scalar: y = PSUM, rounded once
                DMA: y -> HBM, with short rows once per strip
    """
    if options.tokens_first:
        d.prepare_transposes(x.dtype)
    tokens = x.shape[0 if options.tokens_first else 1]
    step = min(STRIP, tokens)
    blocks = Sizes(step, step, 0, 0, 1)
    strips, tail = divmod(tokens, step)
    for i in d.loop(strips):
        _packed_strip(d, x, w, y, i * step, step, blocks, options)
    if tail > 0:
        _packed_strip(d, x, w, y, strips * step, tail, blocks, options)


def _packed_strip(d: Any, x: Any, w: Factor, y: Any, start: Any, tokens: int, blocks: Sizes, options: Options) -> None:
    cut = w.rows
    strip = d.sbuf((cut.width, cut.count, tokens), x.dtype)
    load_rows(d, strip, x, cut, 0, cut.count, start, tokens, options.tokens_first)
    expand_and_store(d, y, parts_of(d, strip, cut.count), w, w.panels, start, tokens, blocks, options)
