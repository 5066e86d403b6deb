"""The output head on a CPU without AVX-512, where vLLM's own multiplication of bf16 is slow."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from neuronmm.kernels.cpu import isa
from neuronmm.kernels.cpu.linears import describe
from neuronmm.kernels.cpu.step import LinearWeights


def core_is_faster() -> bool:
    """Return whether the core multiplies dense weights of the model being built faster than vLLM's kernels.

    That is so on processors with AVX2 and nothing newer (docs/results/serving.md).
    """
    on_cpu = torch.empty(0).device.type == "cpu"
    return on_cpu and isa() == "avx2" and torch.get_default_dtype() == torch.bfloat16


class HeadMethod(UnquantizedEmbeddingMethod):
    """vLLM's method of a head, but for the multiplication, which is a call of the C++ core."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Describe the loaded weight [vocabulary, hidden] to the core."""
        layer.described = describe([LinearWeights(layer.weight.data, None, None)], layer.weight.dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits [tokens, vocabulary] of x [tokens, hidden]."""
        y = torch.ops.neuronmm.linears(x, layer.described, layer.weight.shape[0])
        return y if bias is None else y + bias
