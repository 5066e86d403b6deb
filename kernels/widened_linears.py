"""torch's products in 16 bits, on processors that multiply float32 faster.

Where the instructions lack, torch's GEMMs of bf16 and fp16 matrices take 2 to 7 times as long as those of the same
matrices in float32, conversions included (docs/log.md has the measurements).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

_FEW = 16
"""Fewer rows than this wait for the weights, which are half as long in 16 bits."""


def multiplies_bf16(device: torch.device) -> bool:
    """Whether bf16 products are faster than float32 ones there; without the instructions they are far slower.

    AMD's AVX-512 multiplies bf16 at twice the rate of float32, Intel's at half of it: there it takes AMX (docs/log.md).
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    found = _capabilities()
    if found.get("amx_bf16") or found.get("bf16"):
        return True
    return bool(found.get("avx512_bf16")) and "Intel" not in str(found.get("cpu_name"))


def has_amx() -> bool:
    """Whether the CPU has Intel's matrix unit for bf16, which torch's GEMMs use and NeuronMM's own do not."""
    return bool(_capabilities().get("amx_bf16"))


def widened_linears(device: torch.device) -> AbstractContextManager[object]:
    """Within it, linears of 16-bit tensors on an x86 CPU run in float32 where that is faster, and round the result.

    The values are those of the 16-bit product but for the order of its sum, which is float32 in both.
    """
    found = _capabilities()
    if device.type != "cpu" or found.get("architecture") != "x86_64":
        return nullcontext()
    slow = set()
    if not multiplies_bf16(device):
        slow.add(torch.bfloat16)
    if not (found.get("amx_fp16") or found.get("avx512_fp16")):
        slow.add(torch.float16)
    return _Widened(slow) if slow else nullcontext()


class _Widened(TorchFunctionMode):
    """Widens the operands of linears of these dtypes."""

    def __init__(self, dtypes: set[torch.dtype]) -> None:
        super().__init__()
        self._dtypes = dtypes

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is not linear:
            return function(*args, **kwargs)
        return self._linear(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if input.dtype not in self._dtypes or input.numel() < _FEW * input.shape[-1]:
            return linear(input, weight, bias)
        wide = None if bias is None else bias.float()
        return linear(input.float(), weight.float(), wide).to(input.dtype)


def _capabilities() -> Mapping[str, Any]:
    """What torch says of the CPU; nothing before torch could."""
    found: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return found
