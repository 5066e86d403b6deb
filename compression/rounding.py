"""Stochastic rounding, which keeps small changes of already rounded values on average.

The factors of a bf16 checkpoint are bf16 values. Training changes most of them by less than half a bf16 step, so that
rounding to nearest would undo the change.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def round_stochastically(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round each value to one of its two neighbours in ``dtype``, with probabilities that preserve the mean.

    Args:
        values: float32, of any shape and on any device.
        dtype: a floating dtype; values that it represents exactly do not change.
        generator: a CPU generator, from which one number per value is drawn.

    Returns:
        A tensor of the same shape, of ``dtype``, on the CPU.
    """
    values = values.detach().cpu()
    near = values.to(dtype, copy=True)
    held = near.to(values.dtype)
    error = values - held
    other = torch.nextafter(near, torch.where(error > 0, math.inf, -math.inf).to(dtype))
    step = other.to(values.dtype) - held
    return torch.where(torch.rand(values.shape, generator=generator) * step.abs() < error.abs(), other, near)
