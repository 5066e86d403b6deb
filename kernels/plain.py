"""Plain torch on any device: ``naive`` is the two-GEMM baseline, ``torch`` fuses as far as torch's ops reach.

Int8 factors are converted to the dtype of the call, each time: ``naive`` dequantises, ``torch`` scales the product.

``torch`` runs the A factors of gate and up as one product where they lie stacked in memory (``stack`` puts them
there without a second copy of the weights), and evaluates SwiGLU in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from neuronmm.kernels.int8 import Int8, Weight, dense
from neuronmm.kernels.ops import LowRank, Op, register


def stack(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Copy ``a`` [r1, in] and ``b`` [r2, in] into one buffer; return two views of it, adjacent in memory."""
    both = torch.cat([a, b])
    return both[: len(a)], both[len(a) :]


def _stacked(a: Weight, b: Weight) -> Tensor | None:
    """One [r1 + r2, in] view over two row-adjacent tensors, or None if they are not adjacent."""
    if isinstance(a, Int8) or isinstance(b, Int8):
        return None
    adjacent = (
        a.is_contiguous()
        and b.is_contiguous()
        and a.shape[1] == b.shape[1]
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and b.storage_offset() == a.storage_offset() + a.numel()
    )
    return a.as_strided((len(a) + len(b), a.shape[1]), a.stride()) if adjacent else None


def _times(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    return linear(x, dense(weight, x.dtype), bias)


def _times_scaled_after(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """The same with the scales of an int8 weight applied to the product: its values are exact in every float dtype.

    That pays where x has few rows: it spares the dequantised matrix for some passes over the result. Not in float16,
    which a product of whole numbers may overflow.
    """
    if not isinstance(weight, Int8) or x.dtype == torch.float16 or 2 * x.numel() > x.shape[-1] ** 2:
        return _times(x, weight, bias)
    y = linear(x, weight.values.to(x.dtype)) * weight.scales
    return (y if bias is None else y + bias).to(x.dtype)


Times = Callable[..., Tensor]


def _linear(x: Tensor, factors: LowRank, times: Times) -> Tensor:
    return times(times(x, factors.A), factors.B, factors.bias)


def _middles(x: Tensor, gate: LowRank, up: LowRank, times: Times) -> tuple[Tensor, Tensor]:
    """A x of both, computed once where they share A."""
    g = times(x, gate.A)
    return g, g if up.shares_a(gate) else times(x, up.A)


@register(Op.LINEAR, "naive", refuses=lambda *_: None, priority=-1)
def naive_linear(x: Tensor, factors: LowRank) -> Tensor:
    """Two GEMMs, the rank-r intermediate through memory: the baseline a fused kernel has to beat."""
    return _linear(x, factors, _times)


@register(Op.SWIGLU, "naive", refuses=lambda *_: None, priority=-1)
def naive_swiglu(x: Tensor, gate: LowRank, up: LowRank, down: LowRank) -> Tensor:
    """Six GEMMs (five with a shared A) and two elementwise passes, every intermediate through memory."""
    g, u = _middles(x, gate, up, _times)
    return _linear(silu(_times(g, gate.B, gate.bias)) * _times(u, up.B, up.bias), down, _times)


@register(Op.LINEAR, "torch", refuses=lambda *_: None, priority=0)
def torch_linear(x: Tensor, factors: LowRank) -> Tensor:
    """Torch has nothing to fuse in a single low-rank linear: the same two GEMMs."""
    return _linear(x, factors, _times_scaled_after)


@register(Op.SWIGLU, "torch", refuses=lambda *_: None, priority=0)
def torch_swiglu(x: Tensor, gate: LowRank, up: LowRank, down: LowRank) -> Tensor:
    """Five GEMMs where gate and up share an A or theirs are stacked; SwiGLU in place, out of place under autograd."""
    if torch.is_grad_enabled():
        return naive_swiglu(x, gate, up, down)
    times, both = _times_scaled_after, _stacked(gate.A, up.A)
    if both is None:
        g, u = _middles(x, gate, up, times)
    else:
        g, u = linear(x, both).split([gate.A.shape[0], up.A.shape[0]], dim=-1)
    hidden = silu(times(g, gate.B, gate.bias), inplace=True).mul_(times(u, up.B, up.bias))
    return _linear(hidden, down, times)
