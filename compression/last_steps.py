"""What ends a run: a checkpoint's factors trained end to end, then stored in 8 bits; and the room this takes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.filesize import decimal
from torch import Tensor

from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.distillation import rows_a_pass
from neuronmm.compression.eight_bit import store_int8
from neuronmm.compression.recovery import Recovery, train_factors
from neuronmm.kernels.widened_linears import multiplies_bf16
from neuronmm.models.errors import UserError
from neuronmm.models.progress import Progress


def last_steps(
    folder: Path,
    rows: Tensor | None,
    config: CompressionConfig,
    progress: Progress,
    *,
    dense: Path,
    device: str,
    work: Path,
) -> dict[str, Any] | None:
    """Do to the checkpoint in ``folder`` what ``config`` asks for and say how recovery went, None where there was none.

    ``rows`` [rows, length] are the calibration's tokens, which recovery needs; ``dense``, ``device`` and ``work`` are
    as in :func:`neuronmm.compression.recovery.train_factors`.
    """
    recovery = None
    if config.recover != "off":
        assert rows is not None
        how = recovery_of(config, device)
        recovery = train_factors(folder, rows, how, progress, dense=dense, device=device, work=work)
        recovery["text"] = config.calibration
    if config.factors == "int8":
        store_int8(folder)
    return recovery


def recovery_of(config: CompressionConfig, device: str) -> Recovery:
    """How ``recover`` trains: SVD-LLM's two stages of LoRA, or the factors themselves, which learn faster.

    A step of the factors is one pass of the model: with long rows, eight of them a step would be very few steps.
    """
    shared = {"seed": config.seed, "autocast": multiplies_bf16(torch.device(device))}
    if config.recover == "lora":
        return Recovery(**shared)
    batch = rows_a_pass(config.calibration_length)
    return Recovery(rank=0, two_stage=False, learning_rate=1e-4, epochs=2, batch=batch, **shared)


def check_device(device: str) -> None:
    """Check that torch can compute on ``device``.

    Raises:
        UserError: it is a GPU, and torch sees none.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device}: torch sees no CUDA GPU; install a CUDA build of torch, or use cpu")


def check_room(out: Path, before: int, size: int, parameters: int, factors: int, config: CompressionConfig) -> None:
    """Check that the disk has room for a run into ``out``, and the memory for its recovery.

    Recovery and 8 bits write anew, beside the old, what they replace: the state after each pass, the shards at the end.

    Args:
        out: the folder that is to be written; the one it lies in exists.
        before: bytes that lie on the disk when the last steps begin.
        size: bytes of the checkpoint that these change.
        parameters: the parameters of the model that recovery holds, in float32.
        factors: how many of them belong to factors. Trained themselves they have gradients, moments and a best state;
            LoRA's adapters are next to nothing.

    Raises:
        UserError: there is too little of either.
    """
    state = 16 * factors if config.recover == "factors" else 0
    rewritten = size if config.recover != "off" or config.factors == "int8" else 0
    needed = before + state + max(state, rewritten)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise UserError(f"{out.parent}: {_short('disk', free, needed)}; free that much, or give another -o")
    if config.recover == "off":
        return
    needed, free = 4 * parameters + state, psutil.virtual_memory().available
    if free < needed:
        raise UserError(f"recover: {_short('memory', free, needed)}; refine trains block by block instead")


def _short(what: str, free: int, needed: int) -> str:
    """What is there of ``what``, what is needed and what lacks, bytes each in the unit that suits them."""
    return f"{decimal(free)} of {what} free, about {decimal(needed)} needed, {decimal(needed - free)} more"
