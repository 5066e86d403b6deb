"""A linear whose weight is in fp8: computed in the dtype of its input, stored as Trainium's kernels read it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from neuronmm.kernels import Fp8
from neuronmm.models.low_bits import LowBitsModule


class Fp8Linear(LowBitsModule):
    """``y = W x + bias`` with ``W[i, j] = weight[i, j] * weight_scale[i]``.

    Dimensions: x [..., in_features] -> [..., out_features]; weight float8_e4m3fn [out, in], which is a float to torch
    but is not converted with the module.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        weight = torch.zeros(out_features, in_features, dtype=torch.float8_e4m3fn, device=device)
        super().__init__(Fp8(weight, torch.zeros(out_features, dtype=torch.float32, device=device)))
        self.in_features, self.out_features = in_features, out_features
        zeros = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.bias = None if zeros is None else nn.Parameter(zeros)

    @property
    def matrix(self) -> Fp8:
        return Fp8(self.weight, self.weight_scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp8Linear:
        weight = self.weight.data
        super()._apply(fn, recurse)
        if self.weight.dtype != weight.dtype:
            self.weight.data = weight.to(self.weight.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.matrix.dequantise(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, fp8"
