"""``y = B (A x)`` in one kernel: the paper's XUV (arXiv 2510.25977), the rank-r intermediate never leaves SBUF.

For each strip of tokens: load x, compute ``A x`` for all of the rank (each element accumulated over the whole input
in PSUM, rounded once), keep it, then stream B past it. Up to 128 tokens there is one strip, every weight is read
once in long rows and the evictions gather several chunks (the decode variant); beyond, strips of ``blocks.tokens``
share each weight panel (the prefill variant). The weights are packed by :func:`neuronmm.kernels.layout.pack`.
"""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.layout import Chunks
from neuronmm.kernels.nki.blocks import Blocks
from neuronmm.kernels.nki.stages import first_factor, load_rows, packing, rms_scale, second_factor


def low_rank_matmul(
    d: Any,
    x: Any,
    a: Any,
    b: Any,
    y: Any,
    rank: int,
    blocks: Blocks,
    residual: Any = None,
    epsilon: float | None = None,
) -> None:
    """Body of the kernel on the dialect ``d``.

    Dimensions: ``x`` [in, tokens], ``y`` and ``residual`` [out, tokens]; ``a`` and ``b`` packed, of [rank, in] and
    [out, rank]. With ``epsilon`` the input is RMS-normalised (its weight packed into ``a``); ``residual`` is added.
    """
    inputs, tokens = x.shape
    how_a, how_b = packing(a, inputs, rank), packing(b, rank, y.shape[0])
    strips, rest = divmod(tokens, blocks.tokens)
    for i in d.loop(strips):
        _strip(d, x, a, b, y, how_a, how_b, i * blocks.tokens, blocks.tokens, blocks, residual, epsilon)
    if rest:
        _strip(d, x, a, b, y, how_a, how_b, strips * blocks.tokens, rest, blocks, residual, epsilon)


def _strip(
    d: Any, x: Any, a: Any, b: Any, y: Any, how_a: Any, how_b: Any, start: Any, tokens: int, blocks: Blocks,
    residual: Any, epsilon: float | None,
) -> None:  # fmt: skip
    strip, scale = load_strip(d, x, how_a.rows, start, tokens, blocks, epsilon)
    h = first_factor(d, strip, a, how_a, tokens, blocks.moving, x.dtype, scale)
    second_factor(d, y, h, b, how_b, start, tokens, blocks.moving, residual)


def load_strip(
    d: Any, x: Any, cut: Chunks, start: Any, tokens: int, blocks: Blocks, epsilon: float | None
) -> tuple[Any, Any]:
    """The strip's input, and its RMS scale if ``epsilon`` is given."""
    strip = d.sbuf((cut.width, cut.count, tokens), x.dtype)
    load_rows(d, strip, x, cut, 0, cut.count, start, tokens)
    scale = None if epsilon is None else rms_scale(d, strip, cut, tokens, blocks.moving, epsilon, x.dtype)
    return strip, scale
