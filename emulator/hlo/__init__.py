"""An interpreter of XLA's HLO on torch: one value a rank, collectives between them, Neuron's custom calls."""

from neuronmm.emulator.hlo.node import Settings, UnsupportedError
from neuronmm.emulator.hlo.program import Program

__all__ = ["Program", "Settings", "UnsupportedError"]
