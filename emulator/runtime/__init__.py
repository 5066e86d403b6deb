"""The Neuron runtime on a CPU: what hosts import below themselves, for the time of a ``with`` block."""

from neuronmm.emulator.runtime.session import Session, neuron_emulation

__all__ = ["Session", "neuron_emulation"]
