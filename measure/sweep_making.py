"""How a sweep makes a point's checkpoint: compressed, or trained further from the point that lacks nothing but that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from neuronmm.compression.config import CompressionConfig, renamed
from neuronmm.compression.pipeline import compress
from neuronmm.compression.recover import recover
from neuronmm.compression.workspace import RUN, work_folder
from neuronmm.measure.sweep_points import read_points
from neuronmm.models.documents import read_own

_LAST = {"recover", "factor_dtype"}
"""Settings of what ``recover`` does to a finished checkpoint."""


def make_point(
    dense: Path, folder: Path, config: CompressionConfig, basis: Path | None, progress: Callable[[str, float], None]
) -> None:
    """Make the checkpoint ``folder`` of ``dense``, or go on where it was interrupted; ``basis`` is trained if given."""
    store, begun = folder.with_name("calibration"), read_own(work_folder(folder) / RUN)
    if basis is None or (begun is not None and begun.get("verb") != "recover"):
        compress(dense, folder, config, resume=True, store=store, progress=progress)
        return
    progress("compressing", 1.0)
    assert config.recover != "off"
    recover(
        basis,
        folder,
        config.recover,
        dense=dense,
        calibration=config.calibration,
        calibration_rows=config.calibration_rows,
        calibration_length=config.calibration_length,
        factor_dtype=config.factor_dtype,
        resume=True,
        store=store,
        progress=progress,
    )


def basis_of(out: Path, base: CompressionConfig, own: dict[str, Any], ratio: float) -> Path | None:
    """The checkpoint of the point in ``out`` that a point of the settings ``own`` differs from by recovery alone."""
    if "recover" not in own or base.recover != "off" or base.factor_dtype != "model":
        return None
    before = {name: value for name, value in own.items() if name not in _LAST}
    if not CompressionConfig.build(None, **{**base.model_dump(), **before, "ratio": ratio}).needs_text:
        return None  # it says nothing of the text to train on
    for point in read_points(out):
        settings = renamed(point["settings"], notice=False) if "settings" in point else None
        if (settings, point["ratio"]) == (before, ratio) and (out / point["folder"]).is_dir():
            return out / str(point["folder"])
    return None
