"""PyHLO on a CPU: a Python function that calls ``f32[2, 3].Add(a, b)`` becomes a genuine XLA ``HloModuleProto``."""

from neuronmm.emulator.pyhlo.scribe import HloScribe, HloShape

__all__ = ["HloScribe", "HloShape"]
