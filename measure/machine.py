"""Describe the machine of a measurement, and measure the working memory of a call on it."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

from neuronmm.compression.memory import forget_peak, peak_rss
from neuronmm.version import VERSION


@dataclass(frozen=True)
class Machine:
    """The machine of a measurement: processor or GPU, usable cores, memory, system, versions of the main packages."""

    device: str
    cores: int | None
    memory_bytes: int
    system: str
    versions: dict[str, str]


def describe_machine(device: torch.device) -> Machine:
    """Describe this machine as it measures on ``device``."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = {"neuronmm": VERSION, **{name: version(name) for name in ("torch", "transformers")}}
    return Machine(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        cores=usable,
        memory_bytes=psutil.virtual_memory().total,
        system=platform.platform(),
        versions={"python": platform.python_version(), **packages},
    )


def processor() -> str:
    """Return the processor's name as the system reports it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measure_growth(work: Callable[[], object], device: torch.device) -> int | None:
    """Run ``work`` and return by how many bytes its peak memory exceeds the memory in use before.

    On a GPU this is torch's allocation peak. On a Linux CPU it is the peak resident set, reset before the run. On a
    system without that reset the result is None.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    _return_free_memory()
    if not forget_peak():
        return None
    before = psutil.Process().memory_info().rss
    work()
    return max(peak_rss() - before, 0)


def _return_free_memory() -> None:
    """Return freed heap to the system, so that its reuse counts as growth; glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
