"""NKI on a CPU: runs kernels of both dialects, enforces the hardware's limits and records a trace."""

from neuronmm.emulator.nki.framework import execute
from neuronmm.emulator.nki.machine import NkiError
from neuronmm.emulator.nki.modules import nki_modules
from neuronmm.emulator.nki.run import Run, TensorSpec, run

__all__ = ["NkiError", "Run", "TensorSpec", "execute", "nki_modules", "run"]
