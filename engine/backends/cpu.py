"""The CPU backend: torch, with the low-rank kernels of :mod:`neuronmm.kernels`."""

from __future__ import annotations

from pathlib import Path

import torch

from neuronmm.engine.host import TorchHost
from neuronmm.models.load import load_pretrained


def missing() -> str | None:
    """There is always a CPU."""
    return None


def load(folder: Path, dtype: torch.dtype, impl: str) -> TorchHost:
    """The model of ``folder`` in main memory."""
    return TorchHost(load_pretrained(folder, dtype, "cpu"), impl)
