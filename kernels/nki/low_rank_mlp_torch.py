"""The torch reference of the kernel of :mod:`.low_rank_mlp`, on any machine (see :mod:`.low_rank_matmul_torch`)."""

from __future__ import annotations

import torch
from torch import Tensor

from neuronmm.kernels.nki.layout import unpacked
from neuronmm.kernels.nki.low_rank_matmul_torch import output, token_rows
from neuronmm.kernels.nki.low_rank_mlp import Weights
from neuronmm.kernels.nki.objects import Options
from neuronmm.kernels.ops import LowRank
from neuronmm.kernels.reference import low_rank_swiglu


def low_rank_swiglu_mlp(x: Tensor, w: Weights, options: Options) -> Tensor:
    """Compute ``y = down(silu(gate(x)) * up(x))`` (+ residual); dimensions as in the kernel.

    With ``options.partial``, B of down is the identity.
    """
    gate, up = gate_and_up(w)
    down_a = unpacked(w.down_a)
    down_b = torch.eye(len(down_a)) if options.partial else unpacked(w.down_b)
    return output(low_rank_swiglu(token_rows(x, options, w.gate_a), gate, up, LowRank(down_a, down_b)), options)


def gate_and_up(w: Weights) -> tuple[LowRank, LowRank]:
    """Unpack gate and up; they have the same A tensor if they share it."""
    gate = LowRank(unpacked(w.gate_a), unpacked(w.gate_b))
    return gate, LowRank(gate.A if w.shared else unpacked(w.up_a), unpacked(w.up_b))
