"""The NKI kernels as the hosts' ``nki_call`` takes them, one function for each set of static sizes.

Whether a kernel runs its decode or its prefill variant it decides itself, by the graph's number of tokens. Every
function carries its sum in plain torch as ``reference``, for a runtime that is asked not to interpret kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from neuronmm.kernels.layout import unpack


@cache
def low_rank_linear(inputs: int, rank: int, outputs: int) -> Callable[..., None]:
    """``kernel(x, a, b, y)``: y = B (A x). Dimensions: x [inputs, tokens], y [outputs, tokens]; a, b packed."""
    from neuronmm.kernels.nki import entry_neuronxcc as entry

    def reference(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return unpack(b, rank, outputs) @ (unpack(a, inputs, rank) @ x)

    return _with_reference(entry.low_rank_matmul(rank), reference)


@cache
def low_rank_swiglu(hidden: int, intermediate: int, gate: int, up: int, down: int) -> Callable[..., None]:
    """``kernel(x, gate_a, gate_b, up_a, up_b, down_a, down_b, y)``: the MLP of three factorised linears.

    Dimensions: x, y [hidden, tokens]; gate, up, down: the linears' ranks.
    """
    from neuronmm.kernels.nki import entry_neuronxcc as entry
    from neuronmm.kernels.nki.low_rank_mlp import Ranks

    def product(x: Tensor, a: Tensor, b: Tensor, rank: int, outputs: int) -> Tensor:
        return unpack(b, rank, outputs) @ (unpack(a, x.shape[0], rank) @ x)

    def reference(
        x: Tensor, gate_a: Tensor, gate_b: Tensor, up_a: Tensor, up_b: Tensor, down_a: Tensor, down_b: Tensor
    ) -> Tensor:
        gated = silu(product(x, gate_a, gate_b, gate, intermediate).float())
        act = (gated * product(x, up_a, up_b, up, intermediate).float()).to(x.dtype)
        return product(act, down_a, down_b, down, hidden)

    return _with_reference(entry.low_rank_swiglu_mlp(Ranks(gate, up, down, intermediate)), reference)


def _with_reference(kernel: Any, reference: Callable[..., Tensor]) -> Any:
    kernel.reference = torch.inference_mode()(reference)
    return kernel
