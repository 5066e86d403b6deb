"""The ``cpu`` implementation of the low-rank ops: fused C++ kernels for a few rows, the shape of decoding.

Both factors, in any form, run in one call with one barrier between them. The rank-r intermediate stays in the cache and
in fp32, so the result is rounded only once. Calls with more rows than the core supports are left to torch, whose GEMMs
are faster there.
"""

from __future__ import annotations

from ctypes import byref, c_void_p

import torch
from torch import Tensor

from neuronmm.kernels.cpu.library import (
    INT4_PIVOTED,
    MAX_BATCH,
    NO_RANK,
    NOT_BUILT,
    TYPES,
    Linear,
    core,
    malformed,
    pivoted_int4,
)
from neuronmm.kernels.factors import LowRank
from neuronmm.kernels.ops import Op, register


def _refuses(x: Tensor, *factors: LowRank) -> str | None:
    """Return why the core does not support this call, or None if it does."""
    if core() is None:
        return NOT_BUILT
    weights = [weight for factor in factors for weight in factor[:3] if weight is not None]
    floats = [weight for weight in weights if isinstance(weight, Tensor)]
    tensors = [tensor for factor in factors for tensor in factor.tensors]
    if any(tensor.device.type != "cpu" for tensor in (x, *tensors)):
        return "a tensor is not in main memory"
    if x.dtype not in TYPES or any(tensor.dtype != x.dtype for tensor in floats):
        return "it takes float32 or bfloat16, the same for all tensors, or factors of few bits"
    if not all(factor.rank for factor in factors):
        return NO_RANK
    if any(map(pivoted_int4, factors)):
        return INT4_PIVOTED
    for reason in map(malformed, (weight for factor in factors for weight in factor[:2])):
        if reason is not None:
            return reason
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *tensors)):
        return "it has no backward; use torch.inference_mode()"
    if not all(tensor.is_contiguous() for tensor in tensors):
        return "a weight is not contiguous"
    rows = x.numel() // max(x.shape[-1], 1)
    if not 1 <= rows <= MAX_BATCH:
        return f"it takes 1 to {MAX_BATCH} rows, here are {rows}"
    return None


def _linear(factors: LowRank, x: Tensor, keep: list[Tensor]) -> Linear:
    """Describe a factorised linear of ``x``. ``keep`` receives the tensors that must stay alive during the call."""
    bias = None if factors.bias is None else factors.bias.float()
    if bias is not None:
        keep.append(bias)
    return Linear.of(factors, None if bias is None else bias.data_ptr(), x.dtype)


def _run(function: str, x: Tensor, linears: list[Linear], out: int) -> Tensor:
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], out)
    rows = x.numel() // x.shape[-1]
    threads = torch.get_num_threads()
    run = getattr(core(), function)
    run(*map(byref, linears), c_void_p(x.data_ptr()), TYPES[x.dtype], rows, c_void_p(y.data_ptr()), threads)
    return y


@register(Op.LINEAR, "cpu", refuses=_refuses, priority=10)
def low_rank_linear(x: Tensor, factors: LowRank) -> Tensor:
    """``x`` [..., in] -> [..., out]; 1 to 8 rows."""
    keep: list[Tensor] = []
    return _run("neuronmm_low_rank_linear", x, [_linear(factors, x, keep)], factors.out_features)


@register(Op.SWIGLU, "cpu", refuses=_refuses, priority=10)
def low_rank_swiglu(x: Tensor, gate: LowRank, up: LowRank, down: LowRank) -> Tensor:
    """``x`` [..., hidden] -> [..., hidden]; 1 to 8 rows."""
    keep: list[Tensor] = []
    linears = [_linear(part, x, keep) for part in (gate, up, down)]
    return _run("neuronmm_low_rank_swiglu", x, linears, down.out_features)
