"""The fp32 reference every implementation is measured against: slow, plain, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from neuronmm.kernels.int8 import Weight, dense
from neuronmm.kernels.ops import LowRank, Op, register


def _times(x: Tensor, weight: Weight) -> Tensor:
    return x @ dense(weight, torch.float32).float().T


def _second(middle: Tensor, factors: LowRank) -> Tensor:
    y = _times(middle, factors.B)
    return y if factors.bias is None else y + factors.bias.float()


def _linear(x: Tensor, factors: LowRank) -> Tensor:
    return _second(_times(x, factors.A), factors)


@register(Op.LINEAR, "reference", refuses=lambda *_: None, priority=-1)
def low_rank_linear(x: Tensor, factors: LowRank) -> Tensor:
    """``x`` [..., in] -> [..., out] in float32, whatever the inputs' dtype."""
    with torch.autocast(x.device.type, enabled=False):
        return _linear(x.float(), factors)


@register(Op.SWIGLU, "reference", refuses=lambda *_: None, priority=-1)
def low_rank_swiglu(x: Tensor, gate: LowRank, up: LowRank, down: LowRank) -> Tensor:
    """``x`` [..., hidden] -> [..., hidden] in float32, whatever the inputs' dtype."""
    with torch.autocast(x.device.type, enabled=False):
        x = x.float()
        g = _times(x, gate.A)
        u = g if up.shares_a(gate) else _times(x, up.A)
        return _linear(silu(_second(g, gate)) * _second(u, up), down)
