"""The fused low-rank ops: one signature, one fp32 reference, one implementation per target."""

from neuronmm.kernels.int8 import Int8, quantise
from neuronmm.kernels.ops import (
    KernelError,
    LowRank,
    Op,
    implementations,
    low_rank_linear,
    low_rank_swiglu,
)

__all__ = ["Int8", "KernelError", "LowRank", "Op", "implementations", "low_rank_linear", "low_rank_swiglu", "quantise"]
