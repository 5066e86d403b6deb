"""The data that every stage of a run works with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neuronmm.compression.calibration_store import CalibrationStore
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.reader import Reader
from neuronmm.compression.workspace import Workspace
from neuronmm.models.errors import UserError
from neuronmm.models.progress import Progress


@dataclass(frozen=True)
class Run:
    """One run of ``compress`` or ``recover``.

    ``dense`` reads the dense checkpoint. ``device`` is torch's name of the device on which layers run and train.
    ``store`` has the calibration, if it is stored. ``progress`` is called whenever a fraction of a stage is
    done.
    """

    config: CompressionConfig
    workspace: Workspace
    dense: Reader
    device: str
    store: CalibrationStore
    progress: Progress


def check_device(device: str) -> None:
    """Check that a run can compute on ``device``.

    Raises:
        UserError: it is neither the CPU nor a CUDA GPU, or torch does not see that GPU.
    """
    try:
        asked = torch.device(device)
    except RuntimeError:  # torch has no such device
        asked = None
    if asked is None or asked.type not in ("cpu", "cuda"):
        raise UserError(f"device {device}: must be cpu or cuda")
    if asked.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device}: torch sees no CUDA GPU; install a CUDA build of torch, or use cpu")
    if asked.type == "cuda" and (asked.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {device}: torch sees {torch.cuda.device_count()} CUDA GPUs, numbered from 0")
