"""Measure the working memory of a call: the peak above the memory in use before."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def measure_growth(work: Callable[[], object], device: torch.device) -> int | None:
    """Run ``work`` and return by how many bytes its peak memory exceeds the memory in use before.

    On a GPU this is torch's allocation peak. On a Linux CPU it is the peak resident set, reset before the run (proc(5),
    /proc/pid/clear_refs). If the system has no such reset, the result is None.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    _return_free_memory()
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return None
    before = psutil.Process().memory_info().rss
    work()
    return max(_peak_resident() - before, 0)


def _return_free_memory() -> None:
    """Return freed heap to the system, so that its reuse counts as growth; glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _peak_resident() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
