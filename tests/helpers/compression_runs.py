"""Small compression runs, and the files and tensors that they read and write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from neuronmm.compression.config import BARE, CompressionConfig
from neuronmm.compression.pipeline import compress

EVERYTHING = {"method": "anchored", "allocation": "global", "share_a": "auto", "refine": "fast"}

SMALL = {"ratio": 0.2, "targets": "mlp", "calibration": "self", "calibration_rows": 6, "calibration_length": 12}
SMALL |= {"align": 2, **BARE}


def config(**changes: Any) -> CompressionConfig:
    return CompressionConfig.build(None, **{**SMALL, **changes})


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    content = load_file(folder / "model.safetensors")
    change(content)
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """Return the content of ``folder`` by path: a file's bytes, a symlink's target, or the word ``folder``."""
    entries: dict[str, bytes | str] = {}
    for path in folder.rglob("*"):
        content = os.readlink(path) if path.is_symlink() else "folder" if path.is_dir() else path.read_bytes()
        entries[str(path.relative_to(folder))] = content
    return entries


def weights(folder: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint, except for the reports, which contain times."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith("compression_report")}


def compress_in(source: Path, out: Path, settings: dict[str, Any], force: bool) -> None:
    """Run in a process that a test kills and resumes."""
    torch.set_num_threads(1)
    compress(source, out, config(**settings), resume=True, force=force)


class Interrupted(BaseException):
    """A kill, which no code catches."""


def stop_at(stage: str, count: int) -> Callable[[str, float], None]:
    left = [count]

    def progress(name: str, fraction: float) -> None:
        left[0] -= name == stage
        if left[0] < 0:
            raise Interrupted

    return progress
