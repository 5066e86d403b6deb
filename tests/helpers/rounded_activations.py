"""Activations rounded to 16 bits, in torch: the same integers as the C++ core's (kernels/cpu/integer_dot_impl.h)."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 1e-30
"""The least largest activation of a token."""


def round_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round activations to integers, token by token; ``values * scales`` is what the core multiplies.

    Dimensions: x float32 [rows, in] -> values float64 [rows, in], integers of at most 32767; scales float32 [rows, 1].
    """
    largest = x.abs().amax(dim=1, keepdim=True).clamp_min(SMALLEST)
    levels = torch.tensor(32767.0)
    return (x * (levels / largest)).round().double(), largest / levels
