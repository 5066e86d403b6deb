"""The timing model: predicts when each instruction of a trace of the NKI emulator runs on a NeuronCore."""

from neuronmm.emulator.timing.dependencies import CapacityError
from neuronmm.emulator.timing.report import Report, report
from neuronmm.emulator.timing.simulate import Timeline, simulate
from neuronmm.emulator.timing.spill import spill

__all__ = ["CapacityError", "Report", "Timeline", "report", "simulate", "spill"]
