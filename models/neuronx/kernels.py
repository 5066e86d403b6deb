"""The NKI kernels as the hosts' ``nki_call`` takes them, one function for each set of static sizes.

Activations are [features, tokens] ("HSB") or [tokens, features] ("BSH"). A kernel chooses its block sizes, and with
them decode or prefill, by the tokens of the graph. With an ``epsilon`` above 0 it RMS-normalises its input; the norm's
weight is packed into the factors that read it.

Every function has its torch reference as the attribute ``reference``, for an emulation that does not interpret kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from neuronmm.kernels.nki import low_rank_matmul_torch as matmul
from neuronmm.kernels.nki import low_rank_mlp_torch as mlp
from neuronmm.kernels.nki.choice import factor_plan, mlp_plans, tokens_first
from neuronmm.kernels.nki.low_rank_mlp import weights
from neuronmm.kernels.nki.objects import Options, factor
from neuronmm.kernels.nki.problem import Ranks


@cache
def low_rank_linear(
    inputs: int, rank: int, outputs: int, bias: bool, layout: str, epsilon: float = 0.0
) -> Callable[..., None]:
    """Return ``kernel(x, a, b[, bias], y)``: y = B (A x) (+ bias) with packed ``a`` and ``b``."""
    from neuronmm.kernels.nki import entry_neuronxcc as entry

    def reference(x: Tensor, a: Tensor, b: Tensor, *vector: Tensor) -> Tensor:
        factors = factor(a, factor_plan(inputs, rank, x)), factor(b, factor_plan(rank, outputs, x))
        options = Options(epsilon, bias, vector[0] if bias else 0.0, tokens_first=tokens_first(layout))
        return matmul.low_rank_matmul(x, *factors, options)

    return _with_reference(entry.low_rank_matmul(rank, epsilon=epsilon, bias=bias, layout=layout), reference)


@cache
def packed_linear(inputs: int, outputs: int, layout: str) -> Callable[..., None]:
    """Return ``kernel(x, w, y)``: y = W x with one packed weight."""
    from neuronmm.kernels.nki import entry_neuronxcc as entry

    def reference(x: Tensor, w: Tensor) -> Tensor:
        packed = factor(w, factor_plan(inputs, outputs, x))
        return matmul.packed_matmul(x, packed, Options(tokens_first=tokens_first(layout)))

    return _with_reference(entry.packed_matmul(layout=layout), reference)


@cache
def low_rank_swiglu(
    hidden: int, ranks: Ranks, shared: bool, partial: bool, layout: str, epsilon: float = 0.0
) -> Callable[..., None]:
    """Return ``kernel(x, gate_a, gate_b, up_a, up_b, down_a, down_b, y)``: the MLP of three factorised linears.

    ``shared``: gate and up have one A, and there is no ``up_a``. ``partial``: y is ``A_down`` of the activation, and
    there is no ``down_b``.
    """
    from neuronmm.kernels.nki import entry_neuronxcc as entry

    def reference(x: Tensor, gate_a: Tensor, gate_b: Tensor, *others: Tensor) -> Tensor:
        up_a, up_b, down_a, *down_b = (gate_a, *others) if shared else others
        tensors = gate_a, gate_b, up_a, up_b, down_a, (down_a if partial else down_b[0])
        factors = weights(tensors, mlp_plans(hidden, ranks, x, shared, partial), shared)
        options = Options(epsilon, tokens_first=tokens_first(layout), partial=partial)
        return mlp.low_rank_swiglu_mlp(x, factors, options)

    factory = entry.low_rank_swiglu_mlp_shared if shared else entry.low_rank_swiglu_mlp
    return _with_reference(factory(ranks, epsilon=epsilon, layout=layout, partial=partial), reference)


def _with_reference(kernel: Any, reference: Callable[..., Tensor]) -> Any:
    """Attach ``reference``, which computes in float32, with its result rounded to the dtype of the input."""

    @torch.inference_mode()
    def rounded(x: Tensor, *tensors: Tensor) -> Tensor:
        return reference(x, *tensors).to(x.dtype)

    kernel.reference = rounded
    return kernel
