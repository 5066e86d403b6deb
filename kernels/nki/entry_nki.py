"""The kernels as ``nki`` 0.3 and later runs them: jitted functions of tensors that return their output.

Each factory takes what is static and returns the kernel, to be launched as ``kernel[1](...)``. ``layout`` and packed
weights are those of :mod:`.entry_neuronxcc`; ``blocks`` None: those of :mod:`neuronmm.kernels.tiling` for trn2,
which fit trn3 as well. Importing this needs the Neuron SDK or the emulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nki

from neuronmm.kernels.hardware import TRN2
from neuronmm.kernels.layout import Chunks
from neuronmm.kernels.nki import dialect_nki as d
from neuronmm.kernels.nki import low_rank_matmul as matmul
from neuronmm.kernels.nki import low_rank_mlp as mlp
from neuronmm.kernels.nki.blocks import Blocks, Options
from neuronmm.kernels.nki.choice import linear_blocks, mlp_blocks, tokens_first


def low_rank_matmul(
    rank: int, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False, bias: bool = False,
    layout: str = "HSB",
) -> Callable[..., Any]:  # fmt: skip
    """``kernel(x, a, b[, bias][, residual])``: B (A x) (+ bias) (+ residual); bias [out], residual like the output."""
    first = tokens_first(layout)

    def compute(x: Any, a: Any, b: Any, options: Options) -> Any:
        cut = Chunks(rank)
        out = b.shape[0] // (cut.width * cut.count)
        y = d.output((x.shape[0], out) if first else (out, x.shape[1]), x.dtype)
        sizes = blocks or linear_blocks(x, rank, y, options, TRN2)
        matmul.low_rank_matmul(d, x, a, b, y, rank, sizes, options)
        return y

    def low_rank_matmul_kernel(x: Any, a: Any, b: Any) -> Any:
        return compute(x, a, b, Options(epsilon, tokens_first=first))

    def low_rank_matmul_residual_kernel(x: Any, a: Any, b: Any, extra: Any) -> Any:
        return compute(x, a, b, Options(epsilon, adds=True, residual=extra, tokens_first=first))

    def low_rank_matmul_bias_kernel(x: Any, a: Any, b: Any, vector: Any) -> Any:
        return compute(x, a, b, Options(epsilon, True, vector, tokens_first=first))

    def low_rank_matmul_bias_residual_kernel(x: Any, a: Any, b: Any, vector: Any, extra: Any) -> Any:
        return compute(x, a, b, Options(epsilon, True, vector, True, extra, first))

    if bias:
        return nki.jit(low_rank_matmul_bias_residual_kernel if residual else low_rank_matmul_bias_kernel)
    return nki.jit(low_rank_matmul_residual_kernel if residual else low_rank_matmul_kernel)


def low_rank_swiglu_mlp(
    ranks: mlp.Ranks, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False, layout: str = "HSB"
) -> Callable[..., Any]:
    """``kernel(x, gate_a, gate_b, up_a, up_b, down_a, down_b[, residual])``."""
    first = tokens_first(layout)

    def compute(x: Any, w: mlp.Weights, options: Options) -> Any:
        y = d.output(x.shape, x.dtype)
        mlp.low_rank_swiglu_mlp(d, x, w, y, ranks, blocks or mlp_blocks(x, ranks, False, options, TRN2), options)
        return y

    def low_rank_mlp_kernel(x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, down_b: Any) -> Any:
        w = mlp.Weights(gate_a, gate_b, up_a, up_b, down_a, down_b)
        return compute(x, w, Options(epsilon, tokens_first=first))

    def low_rank_mlp_residual_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, down_b: Any, extra: Any
    ) -> Any:
        w = mlp.Weights(gate_a, gate_b, up_a, up_b, down_a, down_b)
        return compute(x, w, Options(epsilon, adds=True, residual=extra, tokens_first=first))

    return nki.jit(low_rank_mlp_residual_kernel if residual else low_rank_mlp_kernel)


def low_rank_swiglu_mlp_shared(
    ranks: mlp.Ranks, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False, layout: str = "HSB"
) -> Callable[..., Any]:
    """One A for gate and up: ``kernel(x, gate_a, gate_b, up_b, down_a, down_b[, residual])``."""
    first = tokens_first(layout)

    def compute(x: Any, w: mlp.Weights, options: Options) -> Any:
        y = d.output(x.shape, x.dtype)
        mlp.low_rank_swiglu_mlp(d, x, w, y, ranks, blocks or mlp_blocks(x, ranks, True, options, TRN2), options)
        return y

    def low_rank_mlp_shared_kernel(x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, down_b: Any) -> Any:
        w = mlp.Weights(gate_a, gate_b, gate_a, up_b, down_a, down_b, shared=True)
        return compute(x, w, Options(epsilon, tokens_first=first))

    def low_rank_mlp_shared_residual_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, down_b: Any, extra: Any
    ) -> Any:
        w = mlp.Weights(gate_a, gate_b, gate_a, up_b, down_a, down_b, shared=True)
        return compute(x, w, Options(epsilon, adds=True, residual=extra, tokens_first=first))

    return nki.jit(low_rank_mlp_shared_residual_kernel if residual else low_rank_mlp_shared_kernel)
