"""Plain torch on any device: ``naive`` is the two-GEMM baseline, ``torch`` fuses as far as torch's ops reach.

Int8 factors are dequantised for every call, which is right and slow.

``torch`` runs the A factors of gate and up as one product where they lie stacked in memory (``stack`` puts them
there without a second copy of the weights), and evaluates SwiGLU in place.
"""

from __future__ import annotations

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


def _second(middle: Tensor, factors: LowRank) -> Tensor:
    return _times(middle, factors.B, factors.bias)


def _naive_linear(x: Tensor, factors: LowRank) -> Tensor:
    return _second(_times(x, factors.A), factors)


def _middles(x: Tensor, gate: LowRank, up: LowRank) -> tuple[Tensor, Tensor]:
    """A x of both, computed once where they share A."""
    g = _times(x, gate.A)
    return g, g if up.shares_a(gate) else _times(x, up.A)


@register(Op.LINEAR, "naive", refuses=lambda *_: None, priority=-1)
def naive_linear(x: Tensor, factors: LowRank) -> Tensor:
    """Two GEMMs, the rank-r intermediate through memory: the baseline a fused kernel has to beat."""
    return _naive_linear(x, factors)


@register(Op.SWIGLU, "naive", refuses=lambda *_: None, priority=-1)
def naive_swiglu(x: Tensor, gate: LowRank, up: LowRank, down: LowRank) -> Tensor:
    """Six GEMMs (five with a shared A) and two elementwise passes, every intermediate through memory."""
    g, u = _middles(x, gate, up)
    return _naive_linear(silu(_second(g, gate)) * _second(u, up), down)


@register(Op.LINEAR, "torch", refuses=lambda *_: None, priority=0)
def torch_linear(x: Tensor, factors: LowRank) -> Tensor:
    """Torch has nothing to fuse in a single low-rank linear: the same two GEMMs."""
    return _naive_linear(x, factors)


@register(Op.SWIGLU, "torch", refuses=lambda *_: None, priority=0)
def torch_swiglu(x: Tensor, gate: LowRank, up: LowRank, down: LowRank) -> Tensor:
    """Five GEMMs where gate and up share an A or theirs are stacked; SwiGLU in place, out of place under autograd."""
    if torch.is_grad_enabled():
        return naive_swiglu(x, gate, up, down)
    both = _stacked(gate.A, up.A)
    g, u = _middles(x, gate, up) if both is None else linear(x, both).split([gate.A.shape[0], up.A.shape[0]], dim=-1)
    return _naive_linear(silu(_second(g, gate), inplace=True).mul_(_second(u, up)), down)
