"""The kernels as ``neuronxcc.nki`` hosts call them: plain functions of tensors, the output last.

Each factory takes what is static and returns the function to hand to ``nki_call`` or ``nki.jit``. Activations are
[features, tokens]; packed weights come from :func:`neuronmm.kernels.layout.pack`. ``blocks`` None: by token count.
Importing this needs the Neuron SDK or the emulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neuronmm.kernels.nki import dialect_neuronxcc as d
from neuronmm.kernels.nki import low_rank_matmul as matmul
from neuronmm.kernels.nki import low_rank_mlp as mlp
from neuronmm.kernels.nki.blocks import Blocks, default_blocks


def low_rank_matmul(
    rank: int, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False
) -> Callable[..., None]:
    """``kernel(x, a, b, y)``, or with ``residual`` ``kernel(x, a, b, residual, y)``: y = B (A x) (+ residual)."""

    def low_rank_matmul_kernel(x: Any, a: Any, b: Any, y: Any) -> None:
        matmul.low_rank_matmul(d, x, a, b, y, rank, blocks or default_blocks(x.shape[1]), epsilon)

    def low_rank_matmul_residual_kernel(x: Any, a: Any, b: Any, extra: Any, y: Any) -> None:
        matmul.low_rank_matmul(d, x, a, b, y, rank, blocks or default_blocks(x.shape[1]), epsilon, True, extra)

    return low_rank_matmul_residual_kernel if residual else low_rank_matmul_kernel


def low_rank_swiglu_mlp(
    ranks: mlp.Ranks, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False
) -> Callable[..., None]:
    """``kernel(x, gate_a, gate_b, up_a, up_b, down_a, down_b, y)``, with ``residual`` one more tensor before ``y``."""

    def low_rank_mlp_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, down_b: Any, y: Any
    ) -> None:
        w = mlp.Weights(gate_a, gate_b, up_a, up_b, down_a, down_b)
        mlp.low_rank_swiglu_mlp(d, x, w, y, ranks, blocks or default_blocks(x.shape[1]), epsilon)

    def low_rank_mlp_residual_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, down_b: Any, extra: Any, y: Any
    ) -> None:
        w = mlp.Weights(gate_a, gate_b, up_a, up_b, down_a, down_b)
        mlp.low_rank_swiglu_mlp(d, x, w, y, ranks, blocks or default_blocks(x.shape[1]), epsilon, True, extra)

    return low_rank_mlp_residual_kernel if residual else low_rank_mlp_kernel


def low_rank_swiglu_mlp_shared(
    ranks: mlp.Ranks, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False
) -> Callable[..., None]:
    """One A for gate and up: ``kernel(x, gate_a, gate_b, up_b, down_a, down_b, y)``, with ``residual`` as above."""

    def low_rank_mlp_shared_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, down_b: Any, y: Any
    ) -> None:
        w = mlp.Weights(gate_a, gate_b, gate_a, up_b, down_a, down_b, shared=True)
        mlp.low_rank_swiglu_mlp(d, x, w, y, ranks, blocks or default_blocks(x.shape[1]), epsilon)

    def low_rank_mlp_shared_residual_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, down_b: Any, extra: Any, y: Any
    ) -> None:
        w = mlp.Weights(gate_a, gate_b, gate_a, up_b, down_a, down_b, shared=True)
        mlp.low_rank_swiglu_mlp(d, x, w, y, ranks, blocks or default_blocks(x.shape[1]), epsilon, True, extra)

    return low_rank_mlp_shared_residual_kernel if residual else low_rank_mlp_shared_kernel
