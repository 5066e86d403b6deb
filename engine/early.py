"""What a command does for a model before it imports torch, which takes seconds: get the memory of the weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from neuronmm.kernels.pages import get_ahead
from neuronmm.models.contents import chosen_dtype, inspect
from neuronmm.models.errors import UserError
from neuronmm.models.garbage import not_collected
from neuronmm.models.source import folder_at_hand
from neuronmm.models.tensors import FLOATS, headers

_STORED = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_GPU = Path("/proc/driver/nvidia")
_NODES = Path("/sys/devices/system/node")


@contextmanager
def imports_before(model: str, backend: str, dtype: str, weight_dtype: str | None) -> Iterator[None]:
    """Begin to get the memory that ``load`` of these arguments will take on the CPU; the block imports what it needs.

    Whatever is wrong with the model, :func:`~neuronmm.engine.engine.load` reports. It gets the memory itself if the
    model has to be downloaded or unpacked, if the weights will be held in another dtype than they are stored in, under
    torchrun, whose processes hold a part each, and on machines with several memory nodes, where the threads that will
    read a weight should write it first.
    """
    on_cpu = backend == "cpu" or (backend == "auto" and not _GPU.exists())
    if on_cpu and weight_dtype is None and "RANK" not in os.environ and len([*_NODES.glob("node[0-9]*")]) < 2:
        with suppress(UserError, OSError):
            get_ahead(_size(model, dtype))
    with not_collected():
        yield


def _size(model: str, dtype: str) -> int:
    """Return the bytes of the files, which are at least those of the weights; 0 if the weights will be converted."""
    folder = folder_at_hand(model)
    if folder is None:
        return 0
    files = inspect(folder).files
    stored = {dtype for name, (_, dtype) in headers(files) if not name.endswith("_scale")}.intersection(FLOATS)
    if stored != {_STORED.get(chosen_dtype(folder) if dtype == "auto" else dtype)}:
        return 0
    return sum(file.stat().st_size for file in set(files.values()))
