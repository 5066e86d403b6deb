"""``y = W x`` with one packed weight: a half of the low-rank product, for hosts that add up over cores between the two.

A strip of tokens is held whole and every panel of W passes by once.
"""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.nki.blocks import PLAIN, Blocks, Options
from neuronmm.kernels.nki.moves import Factor, factor, in_one, load_rows
from neuronmm.kernels.nki.stages import second_factor

STRIP = 512
"""Tokens of a strip, and of a product."""


def packed_matmul(d: Any, x: Any, w: Any, y: Any, options: Options = PLAIN) -> None:
    """Body of the kernel on the dialect ``d``.

    Dimensions: ``x`` [in, tokens], ``y`` [out, tokens], or the other way round as ``options`` say; ``w`` packed, of
    [out, in].
    """
    features, axis = (1, 0) if options.tokens_first else (0, 1)
    f, tokens = factor(w, x.shape[features], y.shape[features]), x.shape[axis]
    blocks = Blocks(tokens=min(STRIP, tokens), moving=min(STRIP, tokens))
    strips, rest = divmod(tokens, blocks.tokens)
    for i in d.loop(strips):
        _strip(d, x, f, y, i * blocks.tokens, blocks.tokens, blocks, options)
    if rest:
        _strip(d, x, f, y, strips * blocks.tokens, rest, blocks, options)


def _strip(d: Any, x: Any, f: Factor, y: Any, start: Any, tokens: int, blocks: Blocks, options: Options) -> None:
    cut = f.how.rows
    held = d.sbuf((cut.width, cut.count, tokens), x.dtype)
    load_rows(d, held, x, cut, 0, cut.count, start, tokens, options.tokens_first)
    second_factor(d, y, in_one(held, cut.count), f, f.how.panels(), start, tokens, blocks, options)
