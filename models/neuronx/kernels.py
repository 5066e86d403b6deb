"""The NKI kernels as the hosts' ``nki_call`` takes them, one function for each set of static sizes.

Activations are [features, tokens] ("HSB") or [tokens, features] ("BSH"). Whether a kernel runs its decode or its
prefill variant, and with which block sizes, it decides itself, by the tokens of the graph. With an ``epsilon`` above 0
it RMS-normalises its input first; the norm's weight is packed into the factors that read it. Every function carries its
sum in plain torch as ``reference``, for a runtime that is asked not to interpret kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from neuronmm.kernels.nki.layout import unpack


@cache
def low_rank_linear(
    inputs: int, rank: int, outputs: int, bias: bool, layout: str, epsilon: float = 0.0
) -> Callable[..., None]:
    """``kernel(x, a, b[, bias], y)``: y = B (A x) (+ bias) of ``inputs`` and ``outputs`` features; a, b packed."""
    from neuronmm.kernels.nki import entry_neuronxcc as entry

    def reference(x: Tensor, a: Tensor, b: Tensor, *vector: Tensor) -> Tensor:
        y = _product(b, rank, outputs, _product(a, inputs, rank, _normed(_columns(x, layout), epsilon)))
        return _columns(y + vector[0][:, None] if vector else y, layout)

    return _with_reference(entry.low_rank_matmul(rank, epsilon=epsilon, bias=bias, layout=layout), reference)


@cache
def packed_linear(inputs: int, outputs: int, layout: str) -> Callable[..., None]:
    """``kernel(x, w, y)``: y = W x with one packed weight."""
    from neuronmm.kernels.nki import entry_neuronxcc as entry

    def reference(x: Tensor, w: Tensor) -> Tensor:
        return _columns(_product(w, inputs, outputs, _columns(x, layout)), layout)

    return _with_reference(entry.packed_matmul(layout=layout), reference)


@cache
def low_rank_swiglu(
    hidden: int, intermediate: int, gate: int, up: int, down: int, shared: bool, partial: bool, layout: str,
    epsilon: float = 0.0,
) -> Callable[..., None]:  # fmt: skip
    """``kernel(x, gate_a, gate_b, up_a, up_b, down_a, down_b, y)``: the MLP of three factorised linears.

    ``gate``, ``up``, ``down``: their ranks. ``shared``: gate and up have one A, and there is no ``up_a``. ``partial``:
    y is what B of down is applied to, and there is no ``down_b``.
    """
    from neuronmm.kernels.nki import entry_neuronxcc as entry
    from neuronmm.kernels.nki.blocks import Ranks

    def reference(x: Tensor, gate_a: Tensor, gate_b: Tensor, *rest: Tensor) -> Tensor:
        up_a, up_b, down_a, *down_b = (gate_a, *rest) if shared else rest
        x = _normed(_columns(x, layout), epsilon)
        gated = silu(_product(gate_b, gate, intermediate, _product(gate_a, hidden, gate, x)).float())
        wide = _product(up_b, up, intermediate, _product(up_a, hidden, up, x)).float()
        y = _product(down_a, intermediate, down, (gated * wide).to(x.dtype))
        return _columns(_product(down_b[0], down, hidden, y) if down_b else y, layout)

    factory = entry.low_rank_swiglu_mlp_shared if shared else entry.low_rank_swiglu_mlp
    ranks = Ranks(gate, up, down, intermediate)
    return _with_reference(factory(ranks, epsilon=epsilon, layout=layout, partial=partial), reference)


def _product(packed: Tensor, inputs: int, outputs: int, x: Tensor) -> Tensor:
    return unpack(packed, inputs, outputs) @ x


def _normed(x: Tensor, epsilon: float) -> Tensor:
    """``x`` [features, tokens] over the root mean square of its columns."""
    if not epsilon:
        return x
    return (x.float() * (x.float().square().mean(0) + epsilon).rsqrt()).to(x.dtype)


def _columns(x: Tensor, layout: str) -> Tensor:
    """Between a layout and [features, tokens]; its own inverse."""
    return x.T if layout == "BSH" else x


def _with_reference(kernel: Any, reference: Callable[..., Tensor]) -> Any:
    kernel.reference = torch.inference_mode()(reference)
    return kernel
