"""Matrices of few bits: int8 with one scale per row, and int4 with a step and an offset per group of 32 columns.

They need a half and 0.28 of the bytes of bf16, which bound decoding. The rounding of the weights is the only error that
these types add.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 32
"""Columns of a group of :class:`Int4`."""

_OFFSET = 16
"""Unit of a group's offset, in units of the row's scale."""


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


class Int4(NamedTuple):
    """The matrix ``scales[i] * (s q[i, j] - 16 m)`` with q in 0 to 15; s and m in 0 to 255 belong to the group of j.

    The integers are those of Q4_1 and Q4_K of llama.cpp, whose levels it can therefore nearly keep: an unsigned half
    byte, times a step, minus an offset. With 8 bits for each of the latter, a weight has 4.5 bits.

    Dimensions: ``values`` uint8 [out, 36 * blocks], where a block has two groups of 32 columns and the last block is
    filled up with zeros; ``scales`` float32 [out]; ``columns`` is in. A row of ``values`` has 32 bytes per block (byte
    i holds the q of column i in its low half and that of column 32 + i in its high half), then s and m of every group.
    """

    values: Tensor
    scales: Tensor
    columns: int

    @property
    def shape(self) -> torch.Size:
        """[out, in], like the shape of a tensor."""
        return torch.Size((len(self.values), self.columns))

    def integers(self) -> Tensor:
        """Return ``s q - 16 m``, int16 [out, in]."""
        rows, blocks = len(self.values), self.values.shape[1] // 36
        halves, groups = self.values.split([GROUP * blocks, 4 * blocks], dim=1)
        halves = halves.reshape(rows, blocks, 1, GROUP)
        q = torch.cat([halves & 15, halves >> 4], dim=2).to(torch.int16)
        step, offset = groups.reshape(rows, blocks, 2, 2, 1).to(torch.int16).unbind(3)
        return (q * step - _OFFSET * offset).view(rows, 2 * GROUP * blocks)[:, : self.columns]

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in a float dtype; each element is rounded once."""
        return (self.integers() * self.scales[:, None]).to(dtype)


LowBits: TypeAlias = Int8 | Int4
"""A matrix of few bits."""

Weight: TypeAlias = Tensor | Int8 | Int4
"""A matrix of floats or of few bits."""


def quantise(weight: Tensor) -> Int8:
    """Round a matrix [out, in] of any float dtype to int8, row by row.

    No element changes by more than half its row's scale, apart from float32 rounding.
    """
    wide = weight.detach().float()
    # A row of zeros or of subnormal numbers gets the smallest normal scale, which avoids a division by zero.
    largest = wide.abs().amax(dim=1) if wide.shape[1] else wide.new_zeros(len(wide))
    scales = (largest / 127).clamp_min_(torch.finfo(torch.float32).tiny)
    return Int8((wide / scales[:, None]).round_().to(torch.int8), scales)


def quantise_int4(weight: Tensor) -> Int4:
    """Round a matrix [out, in] of any float dtype to int4, group by group.

    The steps of a group reach from its smallest to its largest element, and to zero. A row's scale is its largest step
    / 255. No element changes by more than half a step and 16 scales, apart from float32 rounding.
    """
    columns = weight.shape[1]
    wide = pad(weight.detach().float(), (0, -columns % (2 * GROUP)))
    rows, blocks = len(wide), wide.shape[1] // (2 * GROUP)
    wide = wide.view(rows, 2 * blocks, GROUP)
    low, high = wide.amin(2, keepdim=True).clamp_max_(0), wide.amax(2, keepdim=True).clamp_min_(0)
    step = (high - low) / 15
    largest = step.amax(1, keepdim=True) if columns else step.new_zeros(rows, 1, 1)
    scales = (largest / 255).clamp_min_(torch.finfo(torch.float32).tiny)
    s, m = (step / scales).round_().clamp_(1, 255), (-low / (_OFFSET * scales)).round_()
    q = ((wide / scales + _OFFSET * m) / s).round_().clamp_(0, 15).to(torch.uint8).view(rows, blocks, 2, GROUP)
    halves = (q[:, :, 0] | q[:, :, 1] << 4).flatten(1)
    groups = torch.cat([s, m], dim=2).to(torch.uint8).flatten(1)
    return Int4(torch.cat([halves, groups], dim=1), scales.view(-1), columns)


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return ``weight`` as a tensor. A weight of few bits is dequantised to ``dtype``; a float one keeps its dtype."""
    return weight if isinstance(weight, Tensor) else weight.dequantise(dtype)
