"""Predicts when a kernel's instructions run on a NeuronCore, from the trace the NKI emulator records."""

from neuronmm.emulator.timing.dependencies import CapacityError
from neuronmm.emulator.timing.report import Report, report
from neuronmm.emulator.timing.simulate import Timeline, simulate
from neuronmm.emulator.timing.spill import spill

__all__ = ["CapacityError", "Report", "Timeline", "report", "simulate", "spill"]
