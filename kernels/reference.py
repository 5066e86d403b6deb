"""The fp32 reference that every implementation is compared with: plain, and not optimised."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from neuronmm.kernels.factors import Form, LowRank, place_pivots
from neuronmm.kernels.low_bits import Weight, dense
from neuronmm.kernels.ops import Op, register


def _matmul(x: Tensor, weight: Weight) -> Tensor:
    return x @ dense(weight, torch.float32).float().T


def _apply_a(x: Tensor, factors: LowRank) -> Tensor:
    if factors.form is not Form.COLUMNS:
        return _matmul(x, factors.A)
    others, pivots = x.split([x.shape[-1] - factors.rank, factors.rank], dim=-1)
    return pivots + _matmul(others, factors.A)


def _apply_b(h: Tensor, factors: LowRank) -> Tensor:
    y = _matmul(h, factors.B)
    if factors.form is Form.ROWS:
        y = place_pivots(factors.pivots, h, y)
    return y if factors.bias is None else y + factors.bias.float()


def _linear(x: Tensor, factors: LowRank) -> Tensor:
    return _apply_b(_apply_a(x, factors), factors)


@register(Op.LINEAR, "reference", refuses=lambda *_: None, priority=-1)
def low_rank_linear(x: Tensor, factors: LowRank) -> Tensor:
    """``x`` [..., in] -> [..., out] in float32 for inputs of any dtype."""
    with torch.autocast(x.device.type, enabled=False):
        return _linear(x.float(), factors)


@register(Op.SWIGLU, "reference", refuses=lambda *_: None, priority=-1)
def low_rank_swiglu(x: Tensor, gate: LowRank, up: LowRank, down: LowRank) -> Tensor:
    """``x`` [..., hidden] -> [..., hidden] in float32 for inputs of any dtype."""
    with torch.autocast(x.device.type, enabled=False):
        x = x.float()
        g = _apply_a(x, gate)
        u = g if up.shares_a(gate) else _apply_a(x, up)
        return _linear(silu(_apply_b(g, gate)) * _apply_b(u, up), down)
