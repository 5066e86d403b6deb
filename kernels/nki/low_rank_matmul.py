"""``y = B (A x)`` in one kernel: the paper's XUV (arXiv 2510.25977), the rank-r intermediate never leaves SBUF.

For each strip of tokens: compute ``A x`` for all of the rank (accumulated over the whole input in PSUM and float32,
rounded once), keep it, then stream B past it. Up to 128 tokens there is one strip, every weight is read
once in long rows and the evictions gather several chunks (the decode variant); beyond, strips of ``blocks.tokens``
share each weight panel (the prefill variant). The weights are packed by :func:`neuronmm.kernels.layout.pack`.
"""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.nki.blocks import Blocks
from neuronmm.kernels.nki.stages import Factor, factor, first_factors, second_factor


def low_rank_matmul(
    d: Any, x: Any, a: Any, b: Any, y: Any, rank: int, blocks: Blocks, epsilon: float = 0.0, adds: bool = False,
    residual: Any = None,
) -> None:  # fmt: skip
    """Body of the kernel on the dialect ``d``.

    Dimensions: ``x`` [in, tokens], ``y`` and ``residual`` [out, tokens]; ``a`` and ``b`` packed, of [rank, in] and
    [out, rank]. With ``epsilon`` the input is RMS-normalised (its weight packed into ``a``). ``adds``: y = residual +
    B (A x).
    """
    inputs, tokens = x.shape
    fa, fb = factor(a, inputs, rank), factor(b, rank, y.shape[0])
    strips, rest = divmod(tokens, blocks.tokens)
    for i in d.loop(strips):
        _strip(d, x, fa, fb, y, i * blocks.tokens, blocks.tokens, blocks, epsilon, adds, residual)
    if rest:
        _strip(d, x, fa, fb, y, strips * blocks.tokens, rest, blocks, epsilon, adds, residual)


def _strip(
    d: Any, x: Any, a: Factor, b: Factor, y: Any, start: Any, tokens: int, blocks: Blocks, epsilon: float, adds: bool,
    residual: Any,
) -> None:  # fmt: skip
    h = first_factors(d, x, [a], start, tokens, blocks, epsilon)[0]
    second_factor(d, y, h, b, b.how.panels(), start, tokens, blocks.moving, adds, residual)
