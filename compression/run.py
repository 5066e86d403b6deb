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
    """Check that torch can compute on ``device``.

    Raises:
        UserError: it is a GPU, and torch sees none.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device}: torch sees no CUDA GPU; install a CUDA build of torch, or use cpu")
