"""Plain torch on any device: ``naive`` is the two-GEMM baseline, ``torch`` fuses as far as torch's ops allow.

Factors of few bits are converted to the dtype of the call in every call: ``naive`` dequantises the weight; for int8
``torch`` scales the result.

``torch`` multiplies the A factors of gate and up in one GEMM if they are adjacent in memory (``stack`` makes them so
without a second copy of the weights), and evaluates SwiGLU in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from neuronmm.kernels.factors import Form, LowRank, place_pivots
from neuronmm.kernels.low_bits import Int8, Weight, dense
from neuronmm.kernels.ops import Op, register


def stack(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Copy ``a`` [r1, in] and ``b`` [r2, in] into one buffer; return two views of it, adjacent in memory."""
    both = torch.cat([a, b])
    return both[: len(a)], both[len(a) :]


def _stacked(a: Weight, b: Weight) -> Tensor | None:
    """Return one [r1 + r2, in] view over two adjacent tensors, or None if they are not adjacent."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None
    adjacent = (
        a.is_contiguous()
        and b.is_contiguous()
        and a.shape[1] == b.shape[1]
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and b.storage_offset() == a.storage_offset() + a.numel()
    )
    return a.as_strided((len(a) + len(b), a.shape[1]), a.stride()) if adjacent else None


def _matmul(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    return linear(x, dense(weight, x.dtype), bias)


def _matmul_then_scale(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Apply the scales of an int8 weight to the result: the integer values are exact in every float dtype.

    This is faster if x has few rows: passes over the small result replace the dequantised matrix. It is not used for
    float16, where the unscaled sums may overflow.
    """
    if not isinstance(weight, Int8) or x.dtype == torch.float16 or 2 * x.numel() > x.shape[-1] ** 2:
        return _matmul(x, weight, bias)
    y = linear(x, weight.values.to(x.dtype)) * weight.scales
    return (y if bias is None else y + bias).to(x.dtype)


Matmul = Callable[..., Tensor]


def _apply_a(x: Tensor, factors: LowRank, matmul: Matmul) -> Tensor:
    """Return the rank-r intermediate [..., r]."""
    if factors.form is not Form.COLUMNS:
        return matmul(x, factors.A)
    others, pivots = x.split([x.shape[-1] - factors.rank, factors.rank], dim=-1)
    return matmul(others, factors.A) + pivots


def _apply_b(h: Tensor, factors: LowRank, matmul: Matmul) -> Tensor:
    """Return the linear's result for the rank-r intermediate ``h``."""
    if factors.form is not Form.ROWS:
        return matmul(h, factors.B, factors.bias)
    y = place_pivots(factors.pivots, h, matmul(h, factors.B))
    return y if factors.bias is None else y + factors.bias


def _linear(x: Tensor, factors: LowRank, matmul: Matmul) -> Tensor:
    return _apply_b(_apply_a(x, factors, matmul), factors, matmul)


def linears(x: Tensor, group: Sequence[LowRank | Tensor]) -> Tensor:
    """Return the results of several linears of one input, side by side; a shared A is applied once.

    Dimensions: ``x`` [..., in], result [..., sum of the outputs]; a tensor [out, in] is a dense linear without bias.
    """
    results, hidden = [], list[tuple[LowRank, Tensor]]()
    for part in group:
        if isinstance(part, Tensor):
            results.append(linear(x, part))
            continue
        h = next((h for other, h in hidden if part.shares_a(other)), None)
        if h is None:
            h = _apply_a(x, part, _matmul_then_scale)
            hidden.append((part, h))
        results.append(_apply_b(h, part, _matmul_then_scale))
    return results[0] if len(results) == 1 else torch.cat(results, -1)


def _apply_gate_up_a(x: Tensor, gate: LowRank, up: LowRank, matmul: Matmul) -> tuple[Tensor, Tensor]:
    """Return the rank-r intermediates of gate and up, computed once if they share A."""
    g = _apply_a(x, gate, matmul)
    return g, g if up.shares_a(gate) else _apply_a(x, up, matmul)


@register(Op.LINEAR, "naive", refuses=lambda *_: None, priority=-1)
def naive_linear(x: Tensor, factors: LowRank) -> Tensor:
    """Two GEMMs with the rank-r intermediate in memory: the baseline that a fused kernel has to beat.

    The pivots of a pivoted form are copied or added in a pass of their own.
    """
    return _linear(x, factors, _matmul)


@register(Op.SWIGLU, "naive", refuses=lambda *_: None, priority=-1)
def naive_swiglu(x: Tensor, gate: LowRank, up: LowRank, down: LowRank) -> Tensor:
    """Six GEMMs (five with a shared A) and two elementwise passes, with every intermediate in memory."""
    g, u = _apply_gate_up_a(x, gate, up, _matmul)
    return _linear(silu(_apply_b(g, gate, _matmul)) * _apply_b(u, up, _matmul), down, _matmul)


@register(Op.LINEAR, "torch", refuses=lambda *_: None, priority=0)
def torch_linear(x: Tensor, factors: LowRank) -> Tensor:
    """Two GEMMs: torch cannot fuse a single low-rank linear further."""
    return _linear(x, factors, _matmul_then_scale)


@register(Op.SWIGLU, "torch", refuses=lambda *_: None, priority=0)
def torch_swiglu(x: Tensor, gate: LowRank, up: LowRank, down: LowRank) -> Tensor:
    """Five GEMMs if gate and up share an A or have adjacent ones; SwiGLU in place unless autograd is on."""
    if torch.is_grad_enabled():
        return naive_swiglu(x, gate, up, down)
    matmul = _matmul_then_scale
    both = None if Form.COLUMNS in (gate.form, up.form) else _stacked(gate.A, up.A)
    if both is None:
        g, u = _apply_gate_up_a(x, gate, up, matmul)
    else:
        g, u = linear(x, both).split([gate.rank, up.rank], dim=-1)
    hidden = silu(_apply_b(g, gate, matmul), inplace=True).mul_(_apply_b(u, up, matmul))
    return _linear(hidden, down, matmul)
