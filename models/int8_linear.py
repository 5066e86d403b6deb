"""A linear module with an int8 weight that computes in the dtype of its input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from neuronmm.kernels import Int8


class Int8Linear(nn.Module):
    """``y = W x + bias`` with ``W[i, j] = weight[i, j] * weight_scale[i]``. W takes no gradient.

    Dimensions: x [..., in_features] -> [..., out_features]; weight int8 [out, in], weight_scale float32 [out]. The
    scales stay float32 when the module is converted to another dtype.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        weight = torch.zeros(out_features, in_features, dtype=torch.int8, device=device)
        scale = torch.zeros(out_features, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        zeros = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.bias = None if zeros is None else nn.Parameter(zeros)

    @property
    def int8(self) -> Int8:
        """The weight in the form that the kernels take."""
        return Int8(self.weight, self.weight_scale)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.int8.dequantise(x.dtype), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        scale = self.weight_scale.data
        super()._apply(fn, recurse)
        if self.weight_scale.dtype != torch.float32:
            self.weight_scale.data = scale.to(self.weight_scale.device)
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, int8"
