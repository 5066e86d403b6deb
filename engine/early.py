"""What can be done for a model before torch is imported, which takes seconds: get the memory of its weights."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from neuronmm.kernels.pages import get_ahead
from neuronmm.models.contents import weight_files
from neuronmm.models.errors import UserError
from neuronmm.models.source import folder_at_hand

_GPU = Path("/proc/driver/nvidia")


def prepare(model: str, backend: str) -> None:
    """Begin to get the memory that the weights of ``model`` will take on the CPU, in the dtype that they are stored in.

    The memory is the first thing that :func:`~neuronmm.engine.engine.load` takes. Whatever is wrong with the model,
    ``load`` reports. Nothing happens if the backend is not the CPU, if the model has to be downloaded or unpacked, or
    under torchrun, whose processes hold a part each.

    Args:
        model: as :func:`~neuronmm.engine.engine.load` takes it.
        backend: ``cpu``, or ``auto`` on a machine without a GPU.
    """
    on_cpu = backend == "cpu" or (backend == "auto" and not _GPU.exists())
    if not on_cpu or "RANK" in os.environ:
        return
    with suppress(UserError, OSError):
        files = set(weight_files(folder_at_hand(model)).values())
        get_ahead(sum(file.stat().st_size for file in files))
