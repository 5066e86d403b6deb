"""The Neuron runtime on a CPU: the packages that a host imports, emulated for the duration of a ``with`` block."""

from neuronmm.emulator.runtime.session import Session, neuron_emulation

__all__ = ["Session", "neuron_emulation"]
