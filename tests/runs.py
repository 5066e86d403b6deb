"""Small compression runs, and the tensors they read and write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from neuronmm.compression.config import BARE, CompressionConfig

EVERYTHING = {"method": "anchored", "allocation": "global", "share": "auto", "refine": "fast"}

SMALL = {"calibration_rows": 6, "calibration_length": 12, "align": 2, **BARE}


def config(**changes: Any) -> CompressionConfig:
    return CompressionConfig.build(None, **{**SMALL, **changes})


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    content = load_file(folder / "model.safetensors")
    change(content)
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
