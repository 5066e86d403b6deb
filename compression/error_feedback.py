"""Round a matrix to few bits such that its products with known inputs change least (GPTQ, arXiv 2210.17323).

The columns are rounded in order. What a column loses changes the output by ``(w - q) x``; the columns that follow are
changed such that they make up for it as well as they can, on inputs with the Gram matrix ``G = sum x x^T``. With the
upper Cholesky factor U of the inverse of the damped G that is

    columns after j  -=  (w_j - q_j) U[j, j + 1:] / U[j, j]

In int4 the levels of a group are chosen when its first column is reached; the scales of the rows are those of plain
rounding. The result is the plain rounding if that changes the products less.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from neuronmm.kernels import Int4, quantise_int4
from neuronmm.kernels.low_bits import GROUP, int4_elements, int4_integers, int4_levels, int4_scales, pack_int4

DAMPING = 1e-2
"""What is added to the diagonal of the Gram matrix, relative to its mean: GPTQ's own (measured: docs/log.md)."""

RoundColumn = Callable[[Tensor, int], Tensor]
"""Rounds a column [out, 1], given its number, and returns the rounded values."""


class ErrorFeedback:
    """Rounds matrices [out, in] for inputs with the Gram matrix ``gram`` [in, in] of any size and float dtype."""

    def __init__(self, gram: Tensor) -> None:
        self.gram = gram.detach().double()

    def int4(self, weight: Tensor) -> Int4:
        """Round to int4."""
        scales = int4_scales(weight.detach().float())[:, None]
        chosen: list[tuple[Tensor, Tensor]] = []

        def begin(group: Tensor) -> RoundColumn:
            levels = int4_levels(group, scales)
            chosen.append(levels)
            return lambda column, _: int4_elements(int4_integers(column, scales, *levels), scales, *levels)

        wide = self.compensated(weight, begin)
        steps, offsets = (torch.cat(parts, dim=1) for parts in zip(*chosen, strict=True))
        fitted, plain = pack_int4(wide, scales[:, 0], steps, offsets), quantise_int4(weight)
        return min(fitted, plain, key=lambda one: self.loss(weight, one))

    def compensated(self, weight: Tensor, begin: Callable[[Tensor], RoundColumn]) -> Tensor:
        """Return ``weight`` in float32 with each column as it was when its turn came to be rounded.

        ``begin`` gets the columns of each group as they are when its first one is reached, and returns the function
        that rounds them.
        """
        wide, upper = weight.detach().float().clone(), self._inverse_factor.to(torch.float32)
        for start in range(0, wide.shape[1], GROUP):
            group = wide[:, start : start + GROUP]
            end = start + group.shape[1]
            rounded, errors, inside = begin(group), torch.empty_like(group), upper[start:end]
            for j in range(end - start):
                column = group[:, j : j + 1]
                errors[:, j : j + 1] = (column - rounded(column, start + j)) / inside[j, start + j]
                group[:, j + 1 :] -= errors[:, j : j + 1] * inside[j, start + j + 1 : end]
            wide[:, end:] -= errors @ inside[:, end:]
        return wide

    def loss(self, weight: Tensor, rounded: Int4) -> float:
        """Return ``tr((W - Q) G (W - Q)^T)``."""
        change = weight.detach().double() - rounded.dequantise(torch.float64)
        return float((change @ self.gram * change).sum())

    @cached_property
    def _inverse_factor(self) -> Tensor:
        """The upper Cholesky factor [in, in], float64, of the inverse of the damped Gram matrix."""
        power = float(self.gram.diagonal().mean())
        damped = self.gram.clone()
        damped.diagonal().add_(DAMPING * power if power > 0 else 1.0)
        return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
