"""The CUDA backend: the same torch decoder on the first visible GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from neuronmm.engine.host import TorchHost
from neuronmm.models.load import load_pretrained


def missing() -> str | None:
    """Return None if torch sees a GPU, otherwise what to do."""
    if torch.cuda.is_available():
        return None
    return "torch sees no CUDA GPU; install a CUDA build of torch and a driver, or use --backend cpu"


def load(folder: Path, dtype: torch.dtype, impl: str) -> TorchHost:
    """Load the model of ``folder`` into GPU memory."""
    return TorchHost(load_pretrained(folder, dtype, "cuda"), impl)
