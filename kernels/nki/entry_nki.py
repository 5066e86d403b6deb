"""The kernels as ``nki`` 0.3 and later runs them: jitted functions of tensors that return their output.

Each factory takes what is static and returns the kernel, to be launched as ``kernel[1](...)``. Activations are
[features, tokens]; packed weights come from :func:`neuronmm.kernels.layout.pack`. ``blocks`` None: by token count.
Importing this needs the Neuron SDK or the emulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nki

from neuronmm.kernels.layout import Chunks
from neuronmm.kernels.nki import dialect_nki as d
from neuronmm.kernels.nki import low_rank_matmul as matmul
from neuronmm.kernels.nki import low_rank_mlp as mlp
from neuronmm.kernels.nki.blocks import Blocks, default_blocks


def low_rank_matmul(
    rank: int, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False
) -> Callable[..., Any]:
    """``kernel(x, a, b)``, or with ``residual`` ``kernel(x, a, b, residual)``: B (A x) (+ residual)."""

    def low_rank_matmul_kernel(x: Any, a: Any, b: Any) -> Any:
        cut = Chunks(rank)
        y = d.output((b.shape[0] // (cut.width * cut.count), x.shape[1]), x.dtype)
        matmul.low_rank_matmul(d, x, a, b, y, rank, blocks or default_blocks(x.shape[1]), epsilon)
        return y

    def low_rank_matmul_residual_kernel(x: Any, a: Any, b: Any, extra: Any) -> Any:
        cut = Chunks(rank)
        y = d.output((b.shape[0] // (cut.width * cut.count), x.shape[1]), x.dtype)
        matmul.low_rank_matmul(d, x, a, b, y, rank, blocks or default_blocks(x.shape[1]), epsilon, True, extra)
        return y

    return nki.jit(low_rank_matmul_residual_kernel if residual else low_rank_matmul_kernel)


def low_rank_swiglu_mlp(
    ranks: mlp.Ranks, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False
) -> Callable[..., Any]:
    """``kernel(x, gate_a, gate_b, up_a, up_b, down_a, down_b)``, with ``residual`` one more tensor."""

    def low_rank_mlp_kernel(x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, down_b: Any) -> Any:
        y = d.output(x.shape, x.dtype)
        w = mlp.Weights(gate_a, gate_b, up_a, up_b, down_a, down_b)
        mlp.low_rank_swiglu_mlp(d, x, w, y, ranks, blocks or default_blocks(x.shape[1]), epsilon)
        return y

    def low_rank_mlp_residual_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, down_b: Any, extra: Any
    ) -> Any:
        y = d.output(x.shape, x.dtype)
        w = mlp.Weights(gate_a, gate_b, up_a, up_b, down_a, down_b)
        mlp.low_rank_swiglu_mlp(d, x, w, y, ranks, blocks or default_blocks(x.shape[1]), epsilon, True, extra)
        return y

    return nki.jit(low_rank_mlp_residual_kernel if residual else low_rank_mlp_kernel)


def low_rank_swiglu_mlp_shared(
    ranks: mlp.Ranks, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False
) -> Callable[..., Any]:
    """One A for gate and up: ``kernel(x, gate_a, gate_b, up_b, down_a, down_b)``, with ``residual`` as above."""

    def low_rank_mlp_shared_kernel(x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, down_b: Any) -> Any:
        y = d.output(x.shape, x.dtype)
        w = mlp.Weights(gate_a, gate_b, gate_a, up_b, down_a, down_b, shared=True)
        mlp.low_rank_swiglu_mlp(d, x, w, y, ranks, blocks or default_blocks(x.shape[1]), epsilon)
        return y

    def low_rank_mlp_shared_residual_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, down_b: Any, extra: Any
    ) -> Any:
        y = d.output(x.shape, x.dtype)
        w = mlp.Weights(gate_a, gate_b, gate_a, up_b, down_a, down_b, shared=True)
        mlp.low_rank_swiglu_mlp(d, x, w, y, ranks, blocks or default_blocks(x.shape[1]), epsilon, True, extra)
        return y

    return nki.jit(low_rank_mlp_shared_residual_kernel if residual else low_rank_mlp_shared_kernel)
