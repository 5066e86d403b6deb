"""Int8 matrices: symmetric, one scale per row, rounded to nearest. They halve the bytes of bf16, which bound decoding.

Activations stay in floating point, so the rounding of the weights is the only added error: at most half a step per
element. The step of a row is its scale, its largest absolute value / 127.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class Int8(NamedTuple):
    """The matrix ``values[i, j] * scales[i]``.

    Dimensions: ``values`` int8 [out, in], ``scales`` float32 [out].
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """[out, in], like the shape of a tensor."""
        return self.values.shape

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in a float dtype; each element is rounded once."""
        return (self.values * self.scales[:, None]).to(dtype)


Weight: TypeAlias = Tensor | Int8
"""A matrix of floats or of :class:`Int8`."""


def quantise(weight: Tensor) -> Int8:
    """Round a matrix [out, in] of any float dtype to int8, row by row.

    No element changes by more than half its row's scale, apart from float32 rounding.
    """
    wide = weight.detach().float()
    # A row of zeros or of subnormal numbers gets the smallest normal scale, which avoids a division by zero.
    largest = wide.abs().amax(dim=1) if wide.shape[1] else wide.new_zeros(len(wide))
    scales = (largest / 127).clamp_min_(torch.finfo(torch.float32).tiny)
    return Int8((wide / scales[:, None]).round_().to(torch.int8), scales)


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return ``weight`` as a tensor. An int8 weight is dequantised to ``dtype``; a float weight keeps its dtype."""
    return weight.dequantise(dtype) if isinstance(weight, Int8) else weight
