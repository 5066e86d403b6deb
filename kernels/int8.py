"""Int8 matrices: a scale a row, symmetric, rounded to nearest. Half the bytes of bf16, and decoding is bound by bytes.

The activations stay in floating point, so the rounding of the weights is the only new error: at most half a step an
element, where a row's step, its scale, is its largest absolute value / 127.
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
        """[out, in], as a tensor has it."""
        return self.values.shape

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """The matrix in a float dtype, each element rounded to it once."""
        return (self.values * self.scales[:, None]).to(dtype)


Weight: TypeAlias = Tensor | Int8
"""A matrix of floats or of :class:`Int8`."""


def quantise(weight: Tensor) -> Int8:
    """Round a matrix [out, in] of any float dtype to int8, row by row.

    No element moves by more than half its row's scale, but for the float32 rounding of the products.
    """
    wide = weight.detach().float()
    # A row of zeros, or of numbers that float32 hardly tells from them, gets the smallest normal scale.
    scales = (wide.abs().amax(dim=1) / 127).clamp_min_(torch.finfo(torch.float32).tiny)
    return Int8((wide / scales[:, None]).round_().to(torch.int8), scales)


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """``weight`` as a tensor: as it is, or an int8 one dequantised to ``dtype``."""
    return weight.dequantise(dtype) if isinstance(weight, Int8) else weight
