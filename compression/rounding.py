"""Stochastic rounding: a small change to a value that was rounded before is kept on average, not lost.

A factor that a checkpoint holds in bf16 lies on bf16's grid, and training moves most of its values by less than half a
step of it: to the nearest they would all fall back to where they were.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def round_stochastically(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Each of ``values`` as one of its two neighbours in ``dtype``, the nearer the likelier: the mean is the value.

    Args:
        values: float32, of any shape and on any device.
        dtype: a floating type; values it represents stay as they are, in float32 all of them.
        generator: of the CPU; it draws as many numbers as there are values.

    Returns:
        A tensor of that shape and ``dtype``, on the CPU.
    """
    values = values.detach().cpu()
    near = values.to(dtype, copy=True)
    held = near.to(values.dtype)
    error = values - held
    other = torch.nextafter(near, torch.where(error > 0, math.inf, -math.inf).to(dtype))
    step = other.to(values.dtype) - held
    return torch.where(torch.rand(values.shape, generator=generator) * step.abs() < error.abs(), other, near)
