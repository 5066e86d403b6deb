"""Describe the machine of a measurement."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return processor or GPU, usable cores, memory, system and the versions of the main packages."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "cores": usable,
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("neuronmm", "torch", "transformers")},
        },
    }


def processor() -> str:
    """Return the processor's name as the system reports it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
