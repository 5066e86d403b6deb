"""The fp32 reference every implementation is measured against: slow, plain, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from neuronmm.kernels.ops import LowRank, Op, register


def _linear(x: Tensor, factors: LowRank) -> Tensor:
    y = x @ factors.A.float().T @ factors.B.float().T
    return y if factors.bias is None else y + factors.bias.float()


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
        return _linear(silu(_linear(x, gate)) * _linear(x, up), down)
