"""The fp32 reference every implementation is measured against: slow, plain, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from neuronmm.kernels.ops import LowRank, Op, register


def _second(middle: Tensor, factors: LowRank) -> Tensor:
    y = middle @ factors.B.float().T
    return y if factors.bias is None else y + factors.bias.float()


def _linear(x: Tensor, factors: LowRank) -> Tensor:
    return _second(x @ factors.A.float().T, factors)


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
        g = x @ gate.A.float().T
        u = g if up.A is gate.A else x @ up.A.float().T
        return _linear(silu(_second(g, gate)) * _second(u, up), down)
