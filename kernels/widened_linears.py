"""Run torch's 16-bit linears in float32, or in the C++ core, on processors where that is faster.

Without 16-bit instructions, torch's GEMMs of bf16 and fp16 matrices take 2 to 7 times as long as float32 GEMMs of the
same matrices, conversions included. The conversion of a large matrix goes through main memory and takes most of the
time of a call with few rows. The core converts in registers instead. It also reads the weights for up to 4 rows faster
than torch's bf16 linears, measured on AVX-512-BF16 (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from neuronmm.kernels.cpu.library import isa
from neuronmm.kernels.cpu.linears import describe
from neuronmm.kernels.cpu.step import LinearWeights
from neuronmm.kernels.replaced import Replaced

_FEW = 16
"""Calls with fewer rows are bound by reading the weights, which is faster in 16 bits."""

_STEP_ROWS = 4
"""The core takes all calls of at most so many rows. With 8 it is no faster than torch."""

_CORE_ROWS, _LARGE = 192, 1 << 23
"""Where 16 bits are slow, it also takes calls of at most so many rows whose matrix has at least so many elements, 32
MiB in float32."""


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether bf16 matmuls are faster than float32 ones on the device.

    AMD's AVX-512 multiplies bf16 at twice the rate of float32, Intel's at half that rate: Intel needs AMX
    (docs/log.md).
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = _capabilities()
    if capabilities.get("amx_bf16") or capabilities.get("bf16"):
        return True
    return bool(capabilities.get("avx512_bf16")) and "Intel" not in str(capabilities.get("cpu_name"))


def widened_linears(device: torch.device, *, in_core: bool = False) -> AbstractContextManager[object]:
    """Return a context in which 16-bit linears on an x86 CPU run in float32 where that is faster.

    With ``in_core``, bf16 linears of few rows and without gradients run in the C++ core, on any x86 CPU. The result is
    rounded to 16 bits. It differs from that of the 16-bit linear only by the order of the float32 sum.
    """
    capabilities = _capabilities()
    if device.type != "cpu" or capabilities.get("architecture") != "x86_64":
        return nullcontext()
    slow = set()
    if not multiplies_bf16(device):
        slow.add(torch.bfloat16)
    if not (capabilities.get("amx_fp16") or capabilities.get("avx512_fp16")):
        slow.add(torch.float16)
    in_core = in_core and isa() not in (None, "portable")  # the portable core has no GEMM
    return Replaced(linear, partial(_widened, slow, in_core)) if slow or in_core else nullcontext()


def _widened(
    dtypes: set[torch.dtype], in_core: bool, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return torch's linear; operands of these ``dtypes`` are widened, or the core computes it."""
    rows = input.numel() // max(input.shape[-1], 1)
    slow = input.dtype in dtypes and rows >= _FEW
    if not input.dtype is weight.dtype is (input.dtype if bias is None else bias.dtype):
        return linear(input, weight, bias)  # torch says what is wrong
    wide = None if bias is None else bias.float()
    small = rows <= _STEP_ROWS or (slow and rows <= _CORE_ROWS and weight.numel() >= _LARGE)
    if in_core and small and _fits_core(input, weight, wide):
        described = describe([LinearWeights(weight, bias=wide)], input.dtype)
        return torch.ops.neuronmm.linears(input, described, len(weight))
    if not slow:
        return linear(input, weight, bias)
    return linear(input.float(), weight.float(), wide).to(input.dtype)


def _fits_core(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the core can run the linear; it has no gradients there. ``bias`` is a float32 copy."""
    bf16 = input.dtype is weight.dtype is torch.bfloat16 and not torch.is_grad_enabled()
    matrix = weight.ndim == 2 and weight.is_contiguous() and weight.device.type == "cpu"
    added = bias is None or bias.shape == (len(weight),)
    fits = input.numel() > 0 and input.shape[-1] == weight.shape[1] and input.device.type == "cpu"
    return bf16 and matrix and added and fits


def _capabilities() -> Mapping[str, Any]:
    """Return torch's description of the CPU; empty on versions of torch without one."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities
