"""Round a matrix to few bits such that its products with known inputs change least (GPTQ, arXiv 2210.17323).

The columns are rounded in order. What a column loses changes the output by ``(w - q) x``; the columns that follow are
changed such that they make up for it as well as they can, on inputs with the Gram matrix ``G = sum x x^T``. With the
upper Cholesky factor U of the inverse of the damped G that is

    columns after j  -=  (w_j - q_j) U[j, j + 1:] / U[j, j]

The levels of a group of int4 are chosen when its first column is reached; the scales of the rows are those of plain
rounding. The result is the plain rounding if that changes the products less.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from neuronmm.kernels import Int4, Int8, quantise, quantise_int4
from neuronmm.kernels.low_bits import GROUP, int4_elements, int4_integers, int4_levels, int4_scales, pack_int4

DAMPING = 1e-2
"""What is added to the diagonal of the Gram matrix, relative to its mean: GPTQ's own (measured: docs/log.md)."""


class ErrorFeedback:
    """Rounds matrices [out, in] for inputs with the Gram matrix ``gram`` [in, in] of any size and float dtype."""

    def __init__(self, gram: Tensor) -> None:
        self.gram = gram.detach().double()

    def int8(self, weight: Tensor) -> Int8:
        """Round to int8."""
        plain = quantise(weight)
        scales = plain.scales[:, None]

        def integers(columns: Tensor) -> Tensor:
            return (columns / scales).round_().clamp_(-127, 127)

        changed = self._changed(weight, lambda _: lambda column: integers(column) * scales)
        fitted = Int8(integers(changed).to(torch.int8), plain.scales)
        return min(fitted, plain, key=lambda one: self.loss(weight, one))

    def int4(self, weight: Tensor) -> Int4:
        """Round to int4."""
        scales = int4_scales(weight.detach().float())
        chosen: list[tuple[Tensor, Tensor]] = []

        def choose(group: Tensor) -> Callable[[Tensor], Tensor]:
            levels = int4_levels(group, scales[:, None])
            chosen.append(levels)
            return lambda column: int4_elements(
                int4_integers(column, scales[:, None], *levels), scales[:, None], *levels
            )

        changed = self._changed(weight, choose)
        steps, offsets = (torch.cat(parts, dim=1) for parts in zip(*chosen, strict=True))
        fitted, plain = pack_int4(changed, scales, steps, offsets), quantise_int4(weight)
        return min(fitted, plain, key=lambda one: self.loss(weight, one))

    def loss(self, weight: Tensor, rounded: Int8 | Int4) -> float:
        """Return ``tr((W - Q) G (W - Q)^T)``."""
        change = weight.detach().double() - rounded.dequantise(torch.float64)
        return float((change @ self.gram * change).sum())

    def _changed(self, weight: Tensor, choose: Callable[[Tensor], Callable[[Tensor], Tensor]]) -> Tensor:
        """Return ``weight`` in float32, each column as it is when its turn comes to be rounded.

        ``choose`` is called with each group of columns [out, at most 32] when its turn comes. It returns the function
        that rounds a column [out, 1] of the group.
        """
        wide, upper = weight.detach().float().clone(), self._inverse_factor.to(torch.float32)
        for start in range(0, wide.shape[1], GROUP):
            group = wide[:, start : start + GROUP]
            end = start + group.shape[1]
            rounded, errors, inside = choose(group), torch.empty_like(group), upper[start:end, start:end]
            for j in range(end - start):
                column = group[:, j : j + 1]
                errors[:, j : j + 1] = (column - rounded(column)) / inside[j, j]
                group[:, j + 1 :] -= errors[:, j : j + 1] * inside[j, j + 1 :]
            wide[:, end:] -= errors @ upper[start:end, end:]
        return wide

    @cached_property
    def _inverse_factor(self) -> Tensor:
        """The upper Cholesky factor [in, in], float64, of the inverse of the damped Gram matrix."""
        power = float(self.gram.diagonal().mean())
        damped = self.gram.clone()
        damped.diagonal().add_(DAMPING * power if power > 0 else 1.0)
        return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
