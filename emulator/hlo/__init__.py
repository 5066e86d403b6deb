"""An interpreter of XLA's HLO on torch: one value a rank, collectives between them, Neuron's custom calls."""

from neuronmm.emulator.hlo.node import Settings, UnsupportedError
from neuronmm.emulator.hlo.program import Program
from neuronmm.emulator.hlo.types import InvalidGraphError

__all__ = ["InvalidGraphError", "Program", "Settings", "UnsupportedError"]
