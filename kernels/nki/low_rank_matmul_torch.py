"""The torch reference of the kernels of :mod:`.low_rank_matmul`, on any machine.

A kernel's torch reference has the kernel's name and parameters, without the dialect, the output and the block sizes,
and returns the output in float32. It reads the same packed weights and the same layouts, and expands pivoted linears
to two factors. The maths is that of :mod:`neuronmm.kernels.reference`; the kernels add RMSNorm of the input, the
residual and the layout.
"""

from __future__ import annotations

from torch import Tensor

from neuronmm.kernels.nki.layout import from_columns, unpacked
from neuronmm.kernels.nki.objects import Factor, Options
from neuronmm.kernels.ops import LowRank
from neuronmm.kernels.reference import low_rank_linear


def low_rank_matmul(x: Tensor, a: Factor, b: Factor, options: Options) -> Tensor:
    """Compute ``y = B (A x)`` (+ bias) (+ residual); dimensions as in the kernel."""
    bias = (
        from_columns(b.table[:, b.at + b.columns.count :], b.columns) if b.scaled and options.biased else options.bias
    )
    factors = LowRank(unpacked(a), unpacked(b), bias if options.biased else None)
    return output(low_rank_linear(token_rows(x, options, a), factors), options)


def packed_matmul(x: Tensor, w: Factor, options: Options) -> Tensor:
    """Compute ``y = W x``; dimensions as in the kernel."""
    return output(token_rows(x, options, w) @ unpacked(w).float().T, options)


def token_rows(x: Tensor, options: Options, reader: Factor) -> Tensor:
    """Return the kernel's input as float32 [tokens, features], RMS-normalised if ``options.epsilon`` is above 0.

    ``reader``: the factor that reads it. The norm's weight is packed into it, or, if it is scaled, in its table.
    """
    rows = (x if options.tokens_first else x.T).float()
    if options.epsilon == 0:
        return rows
    rows = rows * (rows.square().mean(-1, keepdim=True) + options.epsilon).rsqrt()
    return rows * from_columns(reader.table, reader.rows) if reader.scaled else rows


def output(y: Tensor, options: Options) -> Tensor:
    """Return the kernel's output from ``y`` [tokens, features]: in the kernel's layout, with the residual added."""
    y = y if options.tokens_first else y.T
    return y + options.residual.float() if options.adds else y
