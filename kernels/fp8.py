"""Matrices of eight-bit floats with one scale per row, for Trainium, whose tensor engine multiplies them as they are.

The format is e4m3: a sign, 4 bits of exponent, 3 of mantissa. There are two of that name. NeuronCore-v2 to v4 have the
one with infinities, whose largest number is 240; torch has e4m3fn, without them, up to 448. Up to 240 both have the
same bits, so the scales here map the largest element of a row to 240, and the bytes hold on every NeuronCore.
Sources: AWS Neuron documentation, error codes NCC_EVRF051 and NCC_EVRF052; neuronx-distributed, "Rescaling FP8 weights
for Neuron".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 240.0
"""The largest number of the device's e4m3."""


class Fp8(NamedTuple):
    """The matrix ``values[i, j] * scales[i]``.

    Dimensions: ``values`` float8_e4m3fn [out, in], at most :data:`LARGEST`; ``scales`` float32 [out].
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """[out, in], like the shape of a tensor."""
        return self.values.shape

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in a float dtype; each element is rounded once."""
        wide = torch.promote_types(dtype, torch.float32)
        return (self.values.to(wide) * self.scales[:, None]).to(dtype)


def quantise_fp8(weight: Tensor, scales: Tensor | None = None) -> Fp8:
    """Round a matrix [out, in] of any float dtype to fp8, row by row, with its own scales or with ``scales`` [out].

    No element changes by more than a sixteenth of itself, or, if it is less than 2^-6 row scales, by more than 2^-10 of
    them, apart from float32 rounding.
    """
    wide = weight.detach().float()
    scales = row_scales(wide, LARGEST) if scales is None else scales
    return Fp8((wide / scales[:, None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales)


def row_scales(weight: Tensor, largest: float) -> Tensor:
    """Return the scales [out] that map the largest element of each row of a float32 matrix [out, in] to ``largest``.

    A row of zeros or of subnormal numbers gets the smallest normal scale, which avoids a division by zero.
    """
    most = weight.abs().amax(dim=1) if weight.shape[1] else weight.new_zeros(len(weight))
    return (most / largest).clamp_min_(torch.finfo(torch.float32).tiny)
