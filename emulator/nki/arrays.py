"""Tensors of torch as arrays of NumPy and back, on the same memory; bfloat16 is the type of ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return an array on the same memory, or a copy if the tensor is not contiguous."""
    tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def from_numpy(array: np.ndarray) -> Tensor:
    """Return a tensor on the memory of an array."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
