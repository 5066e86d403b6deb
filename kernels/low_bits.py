"""Matrices of few bits: int8 with one scale per row, and int4 with a step and an offset per group of 32 columns.

They need a half and 0.28 of the bytes of bf16, which bound decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from neuronmm.kernels.fp8 import Fp8, row_scales
from neuronmm.kernels.int4_layout import GROUP, GROUP_BYTES, TILE

_OFFSET = 16
"""Unit of a group's offset, in units of the row's scale."""

_BLOCK = 1 << 18
"""Elements that are rounded together on the CPU, so that their float32 copies stay in the cache."""


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

    Dimensions: ``values`` uint8 [tiles, 288 * groups], where a group has 32 columns and a tile has 16 rows; what the
    last ones lack is filled up with zeros. ``scales`` float32 [out]; ``columns`` is in. A tile has 256 bytes per group:
    for every 8 columns and every row, the 32 bits in which q of column 2 k + h begins at bit 16 h + 4 k. Then, for
    every group, it has s and then m of its 16 rows. In this order a vector holds one column of many rows.
    """

    values: Tensor
    scales: Tensor
    columns: int

    @property
    def shape(self) -> torch.Size:
        """[out, in], like the shape of a tensor."""
        return torch.Size((len(self.scales), self.columns))

    def integers(self) -> Tensor:
        """Return ``s q - 16 m``, int16 [out, in]."""
        tiles, groups = len(self.values), self.values.shape[1] // GROUP_BYTES
        words, rest = self.values.split([256 * groups, 32 * groups], dim=1)
        pairs = words.reshape(tiles, groups, 4, TILE, 2, 2)  # 8 columns, row, h, two bytes
        q = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)  # k
        q = q.permute(0, 3, 1, 2, 5, 4).reshape(tiles, TILE, groups, GROUP).to(torch.int16)
        step, offset = rest.reshape(tiles, groups, 2, TILE).to(torch.int16).permute(2, 0, 3, 1)[..., None]
        whole = (q * step - _OFFSET * offset).view(tiles * TILE, groups * GROUP)
        return whole[: len(self.scales), : self.columns]

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in a float dtype; each element is rounded once."""
        return (self.integers() * self.scales[:, None]).to(dtype)


LowBits: TypeAlias = Int8 | Int4 | Fp8
"""A matrix of few bits."""

Weight: TypeAlias = Tensor | LowBits
"""A matrix of floats or of few bits."""


def quantise(weight: Tensor, scales: Tensor | None = None) -> Int8:
    """Round a matrix [out, in] of any float dtype to int8, row by row.

    No element changes by more than half its row's scale, apart from float32 rounding. Given ``scales`` [out], an
    element beyond 127 of them becomes 127 of them.
    """
    if scales is not None:
        return Int8((weight.float() / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales)

    def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
        wide = rows.float()
        own = row_scales(wide, 127)
        return (wide / own[:, None]).round_().to(torch.int8), own

    return Int8(*_by_rows(rounded, weight))


def quantise_int4(weight: Tensor) -> Int4:
    """Round a matrix [out, in] of any float dtype to int4, group by group.

    The steps of a group reach from its smallest to its largest element, and to zero. A row's scale is its largest step
    / 255. No element changes by more than half a step and 16 scales, apart from float32 rounding.
    """

    def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
        wide = rows.float()
        groups = pad(wide, (0, -wide.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
        scales = int4_scales(wide)
        steps, offsets = int4_levels(groups, scales[:, None, None])
        return pack_int4(wide, scales, steps[..., 0], offsets[..., 0])[:2]

    values, scales = _by_rows(rounded, weight)
    return Int4(values, scales, weight.shape[1])


def _by_rows(rounded: Callable[[Tensor], tuple[Tensor, Tensor]], weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values and scales of ``weight``, rounded in blocks of whole tiles of rows."""
    rows, columns = weight.shape
    block = max(_BLOCK // max(columns, 1) // TILE, 1) * TILE if weight.device.type == "cpu" else max(rows, 1)
    values, scales = zip(*map(rounded, weight.detach().split(block)), strict=True)
    return torch.cat(values), torch.cat(scales)


def int4_scales(weight: Tensor) -> Tensor:
    """Return the scales [out] of a matrix [out, in] of float32: the largest step of each row / 255."""
    groups = pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    low, high = _range(groups)
    largest = ((high - low) / 15).amax((1, 2)) if groups.shape[1] else weight.new_zeros(len(weight))
    return (largest / 255).clamp_min_(torch.finfo(torch.float32).tiny)


def int4_levels(group: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the step s and the offset m [..., 1] of groups [..., at most 32]; ``scales`` are those of their rows.

    A group whose elements need a larger step than 255 scales gets that one.
    """
    low, high = _range(group)
    steps = ((high - low) / 15 / scales).round_().clamp_(1, 255)
    return steps, (-low / (_OFFSET * scales)).round_().clamp_(0, 255)


def int4_integers(weight: Tensor, scales: Tensor, steps: Tensor, offsets: Tensor) -> Tensor:
    """Return the nearest q in 0 to 15 of each element, float32; the other tensors broadcast to ``weight``."""
    return ((weight / scales + _OFFSET * offsets) / steps).round_().clamp_(0, 15)


def int4_elements(q: Tensor, scales: Tensor, steps: Tensor, offsets: Tensor) -> Tensor:
    """Return the elements that the integers ``q`` stand for, float32; the other tensors broadcast to ``q``."""
    return (steps * q - _OFFSET * offsets) * scales


def pack_int4(weight: Tensor, scales: Tensor, steps: Tensor, offsets: Tensor) -> Int4:
    """Round a matrix to given levels.

    Dimensions: ``weight`` float32 [out, in], ``scales`` [out], ``steps`` and ``offsets`` [out, groups].
    """
    rows, columns = weight.shape
    short = -rows % TILE
    wide = pad(weight, (0, -columns % GROUP, 0, short)).unflatten(1, (-1, GROUP))
    s, m = pad(steps, (0, 0, 0, short), value=1.0)[..., None], pad(offsets, (0, 0, 0, short))[..., None]
    q = int4_integers(wide, pad(scales, (0, short), value=1.0)[:, None, None], s, m).to(torch.uint8)
    tiles, groups = len(wide) // TILE, wide.shape[1]
    q = q.view(tiles, TILE, groups, 4, 2, 2, 2).permute(0, 2, 3, 1, 6, 4, 5)  # ..., h, bytes of h, halves of a byte
    words = (q[..., 0] | q[..., 1] << 4).reshape(tiles, 256 * groups)
    rest = torch.cat([s, m], dim=2).view(tiles, TILE, groups, 2).permute(0, 2, 3, 1).reshape(tiles, 32 * groups)
    return Int4(torch.cat([words, rest.to(torch.uint8)], dim=1), scales.clone(), columns)


def _range(group: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest element [..., 1] of each group, or zero if that is beyond."""
    return group.amin(-1, keepdim=True).clamp_max_(0), group.amax(-1, keepdim=True).clamp_min_(0)


def stored(weight: Weight) -> tuple[Tensor, ...]:
    """Return the tensors that hold a weight: itself, or values and scales."""
    return (weight,) if isinstance(weight, Tensor) else weight[:2]


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return ``weight`` as a tensor. A weight of few bits is dequantised to ``dtype``; a float one keeps its dtype."""
    return weight if isinstance(weight, Tensor) else weight.dequantise(dtype)
