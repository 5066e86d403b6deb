"""Memory and disk space: what a run needs, checked before it begins, and the peak memory of this process."""

from __future__ import annotations

import math
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from rich.filesize import decimal

from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.control_groups import free_in_groups
from neuronmm.compression.workspace import work_folder
from neuronmm.models import processes
from neuronmm.models.errors import UserError

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_rss() -> int:
    """Return the peak resident memory of this process in bytes, since its start or the last :func:`forget_peak`."""
    if _STATUS.exists():  # getrusage would also count the peak of the process that started this one
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> bool:
    """Reset the peak of :func:`peak_rss`; False if the system cannot, which only Linux can (proc(5))."""
    try:
        _CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def free_memory(device: str | torch.device) -> int:
    """Return the bytes that are free in the memory of ``device``."""
    if torch.device(device).type != "cuda":
        return int(min(psutil.virtual_memory().available, free_in_groups()))
    torch.cuda.empty_cache()  # what torch holds without need does not count as free
    return torch.cuda.mem_get_info(device)[0]


def check_room(
    out: Path,
    before: int,
    size: int,
    parameters: int,
    factors: int,
    working: tuple[int, int],
    config: CompressionConfig,
    device: str,
) -> None:
    """Check that the disk has room for a run into ``out``, and that its recovery fits in the memory of ``device``.

    Recovery and weights of few bits are written beside what they replace: the training state after each epoch, and the
    shards at the end.

    Args:
        out: the output folder; its parent exists.
        before: bytes on the disk when recovery begins.
        size: bytes of the checkpoint that recovery and rounding rewrite.
        parameters: the parameters of the model that recovery holds, in float32.
        factors: how many of these belong to factors. If they are trained themselves, they have gradients, moments and a
            best state. LoRA's adapters are negligible.
        working: the other bytes that recovery holds, in main memory and on ``device``.
        config: the settings.
        device: torch's name of the device on which recovery trains.

    Raises:
        UserError: there is too little of either.
    """
    state = 16 * factors if config.recover == "factors" else 0
    rounded = config.factor_dtype != "model" or config.weight_dtype != "model"
    rewritten = size if config.recover != "off" or rounded else 0
    needed = before + state + max(state, rewritten)
    check_disk(out, needed)
    if config.recover == "off":
        return
    states, passes = working
    training = 4 * parameters + state + passes
    on_gpu = torch.device(device).type == "cuda"
    here = 4 * parameters if on_gpu else training  # a model is loaded into main memory first
    _check_memory("memory", "cpu", (here + states) * processes.on_this_machine())
    if on_gpu:  # each process has one of its own
        _check_memory("GPU memory", device, training)


def _check_memory(what: str, device: str, needed: int) -> None:
    """Check that ``device`` has the memory that recovery needs."""
    free = free_memory(device)
    if free < needed:
        fewer = "start fewer processes, or " if processes.size() > 1 and device == "cpu" else ""
        advice = f"{fewer}leave recovery out: refine trains block by block"
        raise UserError(f"recover: {_missing(what, free, needed)}; {advice}")


def check_disk(out: Path, needed: int, counted: Sequence[str] = ("*",)) -> None:
    """Check that the disk of the folder ``out``, whose parent exists, has ``needed`` bytes free.

    What an interrupted run left in the work folder was free when that run began, and is used again or removed. It
    counts as free, if the name matches one of the patterns ``counted``.

    Raises:
        UserError: it has not.
    """
    files = (file for pattern in counted for file in work_folder(out).rglob(f"{pattern}.safetensors"))
    needed -= sum(file.stat().st_size for file in files)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise UserError(f"{out.parent}: {_missing('disk', free, needed)}; free that much, or give another -o")


def check_row_memory(count: int, length: int, hidden: int, config: CompressionConfig, device: str) -> None:
    """Check that ``device`` has memory for the rows' hidden states in float32, as many as one layer has at once.

    These are the dense model's before and after the layer, with refinement also the compressed model's before it, and
    with ``anchored`` those of both models before the layer and before its MLP. Processes on GPUs share them.

    Raises:
        UserError: it has not.
    """
    copies = 2
    if config.factorises and len(config.streams) > 1:
        copies = 5 if config.method == "anchored" else 3
    held = math.ceil(count / processes.size()) if torch.device(device).type == "cuda" else count
    needed = copies * 4 * held * length * hidden
    free = free_memory(device)
    if free < needed:
        raise UserError(
            f"calibration_rows {config.calibration_rows}, calibration_length {length}: {free / 1e9:.1f} GB of memory "
            f"available, about {needed / 1e9:.1f} GB needed; choose fewer or shorter rows"
        )


def _missing(what: str, free: int, needed: int) -> str:
    """Return what is free, needed and missing, each in a suitable unit of bytes."""
    return f"{decimal(free)} of {what} free, about {decimal(needed)} needed, {decimal(needed - free)} more"
