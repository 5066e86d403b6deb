"""Round the coefficients of a pivoted linear to int8 or fp8 such that they fit its rounded pivots.

In ``W' = [P; C P]`` the rounding error of P enters W' twice: directly in the rows of the pivots, and through C in all
other rows. So P is rounded first, and C is fitted to the rounded P before it is rounded itself::

    min over C'  ||C P - C' P8||_F  =>  C' = C P P8^T (P8 P8^T)^-1

What a column of C' loses when it is rounded, the columns after it make up for (compression/error_feedback.py), with the
Gram matrix ``P8 P8^T``. The rows of the pivots keep the error of P8. The column form is the row form of the transposed
matrix, except that there is one scale per row of what is stored.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from neuronmm.compression.error_feedback import ErrorFeedback
from neuronmm.kernels import Form, Fp8, Int8, quantise, quantise_fp8


class Round(Protocol):
    """Rounds a matrix [out, in] to few bits, row by row; with ``scales`` [out] instead of the rows' own."""

    def __call__(self, weight: Tensor, scales: Tensor | None = None) -> Int8 | Fp8: ...


ROUND: dict[str, Round] = {"int8": quantise, "fp8": quantise_fp8}
"""The dtype of few bits -> what rounds a matrix to it."""

_RIDGE = 1e-9
"""Weight of the change of the coefficients in the fit, relative to the mean squared norm of a pivot. It decides only if
the rounded pivots are linearly dependent."""


@torch.no_grad()
def round_coefficients(coefficients: Tensor, pivots: Tensor, form: Form, rounded: Round) -> Int8 | Fp8:
    """Fit the coefficients of a pivoted linear to its rounded pivots, and round them in the same way.

    Args:
        coefficients: C [out - r, r] in the form ROWS, D [r, in - r] in the form COLUMNS; of any float dtype.
        pivots: P [r, in] or Q [out, r], before rounding. A linear with a shared A has the P of its leader.
        form: the form of the linear with the pivots.
        rounded: rounds a matrix to few bits.

    Returns:
        The fitted coefficients, rounded with error feedback or plainly, or the original ones: those with which the
        error of W' is smallest.
    """
    exact_pivots, rounded_pivots = _row_form(pivots, form), _row_form(rounded(pivots).dequantise(torch.float64), form)
    exact = _row_form(coefficients, form)
    gram, cross = rounded_pivots @ rounded_pivots.T, exact_pivots @ rounded_pivots.T
    power = float(gram.diagonal().mean())
    ridge = _RIDGE * power if power > 0 else 1.0
    damped = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    change = exact @ torch.linalg.solve(damped, cross - gram, left=False)
    plain, fitted = rounded(coefficients), rounded(_row_form(exact + change, form).contiguous())

    def column(values: Tensor, number: int) -> Tensor:
        """Round a column [out, 1] of the row form with the scales of ``fitted``."""
        if form is Form.ROWS:
            return rounded(values, fitted.scales).dequantise(torch.float32)
        return rounded(values.T, fitted.scales[number : number + 1]).dequantise(torch.float32).T

    wide = ErrorFeedback(gram).compensated(exact + change, lambda _: column)
    compensated = rounded(_row_form(wide, form).contiguous(), fitted.scales)

    def error(low: Int8 | Fp8) -> float:
        """Return ``||C P - C8 P8||^2`` without the constant ``||C P||^2``."""
        values = _row_form(low.dequantise(torch.float64), form)
        return float((values @ gram * values).sum() - 2 * (exact @ cross * values).sum())

    return min(plain, fitted, compensated, key=error)


def _row_form(factor: Tensor, form: Form) -> Tensor:
    """Return a factor of the row form in float64; transpose one of the column form."""
    return factor.double() if form is Form.ROWS else factor.double().T
