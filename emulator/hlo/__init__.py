"""An interpreter of XLA's HLO on torch: one value per rank, real collectives, and Neuron's custom calls."""

from neuronmm.emulator.hlo.node import Settings
from neuronmm.emulator.hlo.program import Program
from neuronmm.emulator.hlo.types import InvalidGraphError, UnsupportedError

__all__ = ["InvalidGraphError", "Program", "Settings", "UnsupportedError"]
