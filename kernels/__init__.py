"""The fused low-rank ops: one signature, one fp32 reference, one implementation per target."""

from neuronmm.kernels.ops import (
    KernelError,
    LowRank,
    Op,
    implementations,
    low_rank_linear,
    low_rank_swiglu,
)

__all__ = ["KernelError", "LowRank", "Op", "implementations", "low_rank_linear", "low_rank_swiglu"]
