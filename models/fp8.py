"""A linear whose weight is in fp8: computed in the dtype of its input, stored as Trainium's kernels read it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from neuronmm.kernels import Fp8
from neuronmm.models.low_bits import LowBitsLinear


class Fp8Linear(LowBitsLinear):
    """``W[i, j] = weight[i, j] * weight_scale[i]``; weight float8_e4m3fn [out, in].

    It is a float to torch, but is not converted with the module.
    """

    precision = "fp8"

    @staticmethod
    def _zeros(out_features: int, in_features: int, scales: Tensor) -> Fp8:
        return Fp8(torch.zeros(out_features, in_features, dtype=torch.float8_e4m3fn, device=scales.device), scales)

    @property
    def matrix(self) -> Fp8:
        return Fp8(self.weight, self.weight_scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp8Linear:
        weight = self.weight.data
        super()._apply(fn, recurse)
        if self.weight.dtype != weight.dtype:
            self.weight.data = weight.to(self.weight.device)
        return self
