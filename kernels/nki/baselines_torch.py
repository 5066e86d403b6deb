"""The torch reference of the kernels of :mod:`.baselines`, on any machine (see :mod:`.low_rank_matmul_torch`)."""

from __future__ import annotations

import torch
from torch import Tensor

from neuronmm.kernels.nki.low_rank_matmul_torch import low_rank_matmul, packed_matmul
from neuronmm.kernels.nki.low_rank_mlp import Weights
from neuronmm.kernels.nki.low_rank_mlp_torch import gate_and_up
from neuronmm.kernels.nki.objects import Factor, Options
from neuronmm.kernels.ops import LowRank
from neuronmm.kernels.reference import low_rank_linear, low_rank_swiglu


def dense_blocked(left: Tensor, right: Tensor) -> Tensor:
    """Compute ``left^T right``; dimensions as in the kernel."""
    return left.float().T @ right.float()


def dense_strips(x: Tensor, f: Factor) -> Tensor:
    """Compute the dense ``y = W x``; dimensions as in the kernel."""
    return packed_matmul(x, f, Options())


def sequential(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Compute ``y = x^T U V``, the low-rank linear with ``A = U^T`` and ``B = V^T``; dimensions as in the kernel."""
    return low_rank_linear(x.T, LowRank(u.T, v.T))


def recomputing(x: Tensor, a: Factor, b: Factor) -> Tensor:
    """Compute ``y = B (A x)``; dimensions as in the kernel."""
    return low_rank_matmul(x, a, b, Options())


def gate_up(x: Tensor, w: Weights) -> Tensor:
    """Compute ``act = silu(gate(x)) * up(x)``, the MLP whose down is the identity; dimensions as in the kernel."""
    gate, up = gate_and_up(w)
    identity = torch.eye(len(gate.B))
    return low_rank_swiglu(x.T, gate, up, LowRank(identity, identity)).T
