"""The CPU core: C++ kernels for a few rows, and the binding that registers them in the dispatch table."""

from neuronmm.kernels.cpu import low_rank
from neuronmm.kernels.cpu.library import core, isa

__all__ = ["core", "isa", "low_rank"]
