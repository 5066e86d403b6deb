"""Several linears of one input as one torch op, without autograd, also for hosts that compile a model themselves.

``describe`` writes the C structs of the linears into a tensor, once. ``torch.ops.neuronmm.linears`` hands that tensor
to the core: a call converts nothing and sees no Python object of a weight, so ``torch.compile`` can put it into a
graph. The structs hold addresses: whoever describes weights keeps them alive and where they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from neuronmm.kernels.cpu.library import NOT_BUILT, TYPES, Linear, Matrix, core, malformed
from neuronmm.kernels.cpu.step import LinearWeights
from neuronmm.kernels.low_bits import Weight, stored
from neuronmm.kernels.ops import KernelError, width_after

MAX_LINEARS = 3
"""Most linears of one call."""


def describe(linears: Sequence[LinearWeights], dtype: torch.dtype) -> Tensor:
    """Return a uint8 tensor that describes one to three linears of one input to ``torch.ops.neuronmm.linears``.

    ``dtype`` is that of the input. Biases are float32. The caller keeps all tensors alive and where they are.

    Raises:
        KernelError: the linears do not fit together, or the core does not support a tensor.
    """
    if not 1 <= len(linears) <= MAX_LINEARS:
        raise KernelError(f"one call takes 1 to {MAX_LINEARS} linears, not {len(linears)}")
    structs = (Linear * len(linears))(*(_struct(linear, dtype) for linear in linears))
    widths = sorted({linear.A.shape[1] if (f := linear.factors) is None else f.in_features for linear in linears})
    if len(widths) > 1:
        raise KernelError(f"linears of one input differ in its width: {widths[0]} and {widths[-1]}")
    return torch.frombuffer(bytearray(structs), dtype=torch.uint8)


def _struct(linear: LinearWeights, dtype: torch.dtype) -> Linear:
    factors, bias = linear.factors, linear.bias
    _check(linear.A)
    address = None
    if bias is not None:
        if bias.dtype != torch.float32 or bias.shape != (linear.out_features,):
            wanted = f"[{linear.out_features}] of torch.float32"
            raise KernelError(f"a bias {list(bias.shape)} of {bias.dtype}, not {wanted}")
        _check_place("bias", (bias,))
        address = bias.data_ptr()
    if factors is None:
        return Linear(Matrix.of(linear.A, dtype), Matrix(), address)
    _check(factors.B)
    if isinstance(factors.pivots, Tensor):
        _check_place("tensor of pivots", (factors.pivots,))
    width_after(factors.in_features, factors)
    return Linear.of(factors, address, dtype)


def _check(weight: Weight) -> None:
    reason = malformed(weight)
    if reason is not None:
        raise KernelError(f"a weight: {reason}")
    _check_place("weight", stored(weight))


def _check_place(what: str, tensors: Sequence[Tensor]) -> None:
    if any(tensor.device.type != "cpu" or not tensor.is_contiguous() for tensor in tensors):
        raise KernelError(f"a {what} is not contiguous, or not in main memory")


def _linears(x: Tensor, described: Tensor, out_features: int) -> Tensor:
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], out_features)
    width = ctypes.c_int64(x.shape[-1])
    count, rows = described.numel() // ctypes.sizeof(Linear), x.shape[:-1].numel()
    linears, x_at, y_at = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (described, x, y))
    if x.dtype not in TYPES or described.numel() % ctypes.sizeof(Linear):
        raise KernelError(f"linears for x of {x.dtype}, described in {described.numel()} bytes")
    library = core()
    if library is None:
        raise KernelError(NOT_BUILT)
    sizes = (TYPES[x.dtype], rows, width, y_at, ctypes.c_int64(out_features), torch.get_num_threads())
    if library.neuronmm_linear_group(linears, count, x_at, *sizes):
        raise KernelError(f"linears that do not take {x.shape[-1]} features, or do not return {out_features}")
    return y


def _shape_of_linears(x: Tensor, described: Tensor, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


# y [..., out_features]: the results of the described linears for x [..., in], side by side; float32 or bfloat16.
_library = torch.library.Library("neuronmm", "DEF")
_library.define("linears(Tensor x, Tensor described, int out_features) -> Tensor")
_library.impl("linears", _linears, "CPU")
torch.library.register_fake("neuronmm::linears", _shape_of_linears, lib=_library)
