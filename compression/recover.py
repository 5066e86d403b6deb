"""The verb ``recover``: a compressed checkpoint's factors trained against the dense model, into a new checkpoint.

What ``compress`` does with the setting ``recover``, done later: same text, same bytes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

from neuronmm.compression import report
from neuronmm.compression.calibration_store import CalibrationStore, tokens_of
from neuronmm.compression.checkpoint import copy_checkpoint
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.last_steps import check_device, check_room, last_steps
from neuronmm.compression.memory import forget_peak, peak_rss
from neuronmm.compression.reader import Reader
from neuronmm.compression.workspace import Workspace
from neuronmm.models.errors import UserError
from neuronmm.models.load import inspect
from neuronmm.models.lowrank import FACTORS
from neuronmm.models.progress import Progress, no_progress
from neuronmm.models.source import read_config, resolve
from neuronmm.models.spec import CompressionSpec
from neuronmm.version import VERSION

_SAME = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_GIVE = "give the dense model with --dense"


def recover(
    model: str | Path,
    out: str | Path,
    train: Literal["factors", "lora"] = "factors",
    *,
    dense: str | Path | None = None,
    calibration: str | None = None,
    calibration_rows: int | None = None,
    calibration_length: int | None = None,
    factors: Literal["model", "int8"] = "model",
    resume: bool = False,
    force: bool = False,
    device: str = "cpu",
    store: Path | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Write ``model`` with its factors trained end to end to the folder ``out`` and return its report, brought up.

    Args:
        model: a checkpoint that ``compress`` wrote: a folder or a hub id. It stays as it is.
        out: the new checkpoint's folder; it appears only when it is complete.
        train: the factors themselves, or LoRA adapters on them in SVD-LLM's two stages, merged when done.
        dense: the model it was made from; by default where its report says that was.
        calibration: ``self`` or a file to train on; by default what the compression was fitted to, and as much of it.
        calibration_rows: how many rows.
        calibration_length: how many tokens each.
        factors: the precision to store them in when they are trained.
        resume: continue an interrupted run of the same settings.
        force: replace ``out`` if it exists.
        device: where to train, as torch names it: ``cpu`` or ``cuda``.
        store: a folder for the calibration's tokens, made or found there; one that ``compress`` filled will do.
        progress: told of every step.

    Raises:
        UserError: anything about the request or the checkpoint that the caller can mend.
    """
    began = time.perf_counter()
    forget_peak()
    check_device(device)
    asked = {
        "recover": train,
        "factors": factors,
        "calibration": calibration,
        "calibration_rows": calibration_rows,
        "calibration_length": calibration_length,
    }
    with Workspace(out, (model, dense, calibration, store), resume=resume, force=force) as workspace:
        return _recover(model, workspace, dense, asked, device, store, progress, began)


def _recover(
    model: str | Path,
    workspace: Workspace,
    given: str | Path | None,
    asked: dict[str, Any],
    device: str,
    store: Path | None,
    progress: Progress,
    began: float,
) -> dict[str, Any]:
    """As :func:`recover`, in a workspace of its own; ``asked`` are the settings, ``given`` the dense model."""
    folder = resolve(model)
    spec = _spec_of(folder)
    done = report.read(folder)
    if done["recovery"] and done["recovery"]["kept"]:
        raise UserError(f"{folder}: its factors were recovered already; start from the checkpoint before that")
    text = spec.calibration or {}
    like = {"calibration": "source", "calibration_rows": "rows", "calibration_length": "length", "seed": "seed"}
    fitted = {name: text.get(key) for name, key in like.items()}
    config = CompressionConfig.build(
        **{**fitted, **{name: value for name, value in asked.items() if value is not None}}
    )
    workspace.protect(folder, config.text_file, done["model"] if given is None else None)
    source = _dense_of(folder, done["model"], given)
    workspace.protect(source)
    reader = Reader(folder)
    size = reader.total_bytes()
    counts = {name: reader.parameters(name) for name in reader.names}
    trained = sum(count for name, count in counts.items() if name.endswith(FACTORS))
    check_room(workspace.out, size, size, sum(counts.values()), trained, config)
    run = {"verb": "recover", "model": str(folder), "bytes": size, "dense": str(source)}
    run |= {"version": VERSION, "device": device, **config.model_dump()}
    workspace.begin(run)
    common = None
    if store is not None:
        common = CalibrationStore(store, source, Reader(source).total_bytes(), device, config)
    rows = tokens_of(workspace, source, config, device, common, progress)

    def fill(final: Path) -> None:
        copy_checkpoint(folder, final)
        work = workspace.folder
        done["recovery"] = recovery = last_steps(final, rows, config, progress, dense=source, device=device, work=work)
        done["bytes"]["compressed"] = Reader(final).total_bytes()
        done["seconds"] += (recovery["resumed_seconds"] if recovery else 0) + time.perf_counter() - began
        done["peak_rss_bytes"] = max(peak_rss(), done["peak_rss_bytes"])
        report.write(done, final)

    done |= {"recover": config.recover, "factors": config.factors}
    workspace.finish(fill)
    return done


def _spec_of(folder: Path) -> CompressionSpec:
    """What the checkpoint says of itself, where it has factors that can be trained."""
    if "quantization_config" not in read_config(folder):
        raise UserError(f"{folder}: is not compressed, so it has no factors to train; use compress --recover")
    spec = inspect(folder).spec
    assert spec is not None
    if spec.factors == "int8":
        raise UserError(f"{folder}: int8 factors cannot be trained; recover the checkpoint before, with --factors int8")
    return spec


def _dense_of(folder: Path, recorded: str, given: str | Path | None) -> Path:
    """The folder of the dense model, which is of the compressed one's shape: as given, or as the report recorded it."""
    try:
        dense = resolve(recorded if given is None else given)
    except UserError as error:
        if given is not None:
            raise
        raise UserError(f"{error}; {_GIVE}") from None
    settings, own = read_config(dense), read_config(folder)
    if "quantization_config" in settings:
        raise UserError(f"{dense}: is compressed or quantised itself; {_GIVE}")
    for key in _SAME:
        if settings.get(key) != own.get(key):
            found = f"{key} {settings.get(key)}, not {own.get(key)}"
            raise UserError(f"{dense}: is not what {folder} was made from ({found}); {_GIVE}")
    return dense
