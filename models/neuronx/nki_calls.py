"""Calls of the NKI kernels of the second dialect on hidden states [..., features], for hosts under PyTorch.

The kernels take [tokens, features], or [features, tokens] on a NeuronCore-v2: ``nki`` transposes bfloat16 tiles in a
mode of the tensor engine that only v3 and later have. It needs the SDK or its emulation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from neuronmm.kernels.hardware import NeuronCore
from neuronmm.kernels.nki import entry_nki as entry
from neuronmm.kernels.nki.problem import Ranks

Jit = Callable[[Any], Any] | None
"""From a kernel function to what a host launches as ``kernel[1](...)``; None: ``nki.jit``."""


@cache
def linear(rank: int, bias: bool, core: NeuronCore, jit: Jit = None) -> Callable[..., Tensor]:
    """Return ``call(x, A, B[, bias])``, a low-rank linear with packed factors."""
    return _on_tokens(entry.low_rank_matmul(rank, bias=bias, layout=_layout(core), core=core, jit=jit), core)


@cache
def mlp(ranks: Ranks, shared: bool, core: NeuronCore, jit: Jit = None) -> Callable[..., Tensor]:
    """Return ``call(x, gate A, gate B, up A, up B, down A, down B)``; ``shared``: without up A."""
    factory = entry.low_rank_swiglu_mlp_shared if shared else entry.low_rank_swiglu_mlp
    return _on_tokens(factory(ranks, layout=_layout(core), core=core, jit=jit), core)


def _layout(core: NeuronCore) -> str:
    return "HSB" if core.name == "v2" else "BSH"


def _on_tokens(kernel: Callable[..., Tensor], core: NeuronCore) -> Callable[..., Tensor]:
    """Return ``kernel`` with input and output [..., features]."""
    first = _layout(core) == "BSH"

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        y = kernel((flat if first else flat.T).contiguous(), *weights)
        return (y if first else y.T).unflatten(0, x.shape[:-1])

    return call
