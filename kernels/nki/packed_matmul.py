"""``y = W x`` with one packed weight: a half of the low-rank product, for hosts that add up over cores between the two.

A strip of tokens is held whole and every panel of W passes by once.
"""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.nki.moves import load_rows
from neuronmm.kernels.nki.objects import Factor, Options, Sizes, in_one
from neuronmm.kernels.nki.stages import second_factor

STRIP = 512
"""Tokens of a strip, and of a product."""


def packed_matmul(d: Any, x: Any, w: Factor, y: Any, options: Options) -> None:
    """Body of the kernel on the dialect ``d``.

    Dimensions: ``x`` [in, tokens], ``y`` [out, tokens], or the other way round as ``options`` say; ``w`` of [out, in].
    """
    if options.tokens_first:
        d.prepare_transposes(x.dtype)
    tokens = x.shape[0 if options.tokens_first else 1]
    step = min(STRIP, tokens)
    blocks = Sizes(step, step, 0, 0, 1)
    strips, rest = divmod(tokens, step)
    for i in d.loop(strips):
        _strip(d, x, w, y, i * step, step, blocks, options)
    if rest > 0:
        _strip(d, x, w, y, strips * step, rest, blocks, options)


def _strip(d: Any, x: Any, f: Factor, y: Any, start: Any, tokens: int, blocks: Sizes, options: Options) -> None:
    cut = f.rows
    held = d.sbuf((cut.width, cut.count, tokens), x.dtype)
    load_rows(d, held, x, cut, 0, cut.count, start, tokens, options.tokens_first)
    second_factor(d, y, in_one(d, held, cut.count), f, f.panels, start, tokens, blocks, options)
