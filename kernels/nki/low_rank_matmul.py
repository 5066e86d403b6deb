"""``y = B (A x)`` in one kernel: the paper's XUV (arXiv 2510.25977), the rank-r intermediate never leaves SBUF.

For each strip of tokens: compute ``A x`` for all of the rank (accumulated over the whole input in PSUM and float32,
rounded once), keep it, then stream B past it. Up to 128 tokens there is one strip, every weight is read
once in long rows and the evictions gather several chunks (the decode variant); beyond, strips of ``blocks.tokens``
share each weight panel (the prefill variant). The weights are packed by :func:`.layout.pack`.
"""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.nki.objects import Factor, Options, Sizes
from neuronmm.kernels.nki.stages import first_factors, second_factor


def low_rank_matmul(d: Any, x: Any, a: Factor, b: Factor, y: Any, blocks: Sizes, options: Options) -> None:
    """Body of the kernel on the dialect ``d``.

    Dimensions: ``x`` [in, tokens], ``y`` and the residual [out, tokens], or the other way round as ``options`` say;
    ``a`` and ``b`` of [rank, in] and [out, rank]. A norm's weight is packed into ``a``.
    """
    if options.tokens_first:
        d.prepare_transposes(x.dtype)
    strips, rest = divmod(x.shape[0 if options.tokens_first else 1], blocks.tokens)
    for i in d.loop(strips):
        _strip(d, x, a, b, y, i * blocks.tokens, blocks.tokens, blocks, options)
    if rest > 0:
        _strip(d, x, a, b, y, strips * blocks.tokens, rest, blocks, options)


def _strip(
    d: Any, x: Any, a: Factor, b: Factor, y: Any, start: Any, tokens: int, blocks: Sizes, options: Options
) -> None:
    made = first_factors(d, x, [a], start, tokens, blocks, options)
    second_factor(d, y, made[0], b, b.panels, start, tokens, blocks, options)
