"""The verb ``recover``: train a compressed checkpoint's factors against the dense model, into a new checkpoint.

The result has the same bytes as that of ``compress`` with the setting ``recover`` on the same text. Both verbs end with
:func:`last_steps`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from neuronmm.compression import report
from neuronmm.compression.calibration import calibration_tokens
from neuronmm.compression.calibration_store import CalibrationStore, SharedStore
from neuronmm.compression.checkpoint import copy_checkpoint, round_factors
from neuronmm.compression.config import CompressionConfig, accepts_old_names
from neuronmm.compression.distillation import rows_per_pass, working_memory
from neuronmm.compression.factor_training import Recovery, train_factors
from neuronmm.compression.fidelity import compare
from neuronmm.compression.identity import name_of_model, of_model, of_run, of_texts, of_weights
from neuronmm.compression.low_bits import store_low_bits
from neuronmm.compression.member import check_rows, workspace_of
from neuronmm.compression.memory import check_room, forget_peak, peak_rss
from neuronmm.compression.reader import Reader
from neuronmm.compression.run import Run, check_device
from neuronmm.compression.shipped_texts import SHIPPED
from neuronmm.compression.workspace import Workspace
from neuronmm.kernels.widened_linears import multiplies_bf16
from neuronmm.models import processes
from neuronmm.models.contents import inspect
from neuronmm.models.errors import UserError
from neuronmm.models.lowrank import FACTORS
from neuronmm.models.model_config import ModelConfig
from neuronmm.models.progress import Progress, no_progress
from neuronmm.models.source import difference, is_compressed, read_config, resolve
from neuronmm.models.spec import CompressionSpec

_GIVE_DENSE = "give the dense model with --dense"


@accepts_old_names
def recover(
    model: str | Path,
    out: str | Path,
    train: Literal["factors", "lora"] = "factors",
    *,
    dense: str | Path | None = None,
    calibration: str | list[str] | None = None,
    calibration_rows: int | None = None,
    calibration_length: int | None = None,
    factor_dtype: Literal["model", "int8", "int4", "fp8"] = "model",
    weight_dtype: Literal["model", "int8", "int4"] = "model",
    resume: bool = False,
    force: bool = False,
    device: str = "cpu",
    store: str | Path | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Train the factors of ``model`` end to end, write the result to the folder ``out`` and return the updated report.

    Args:
        model: a checkpoint that ``compress`` wrote: a folder or a hub id. It does not change.
        out: the folder of the new checkpoint; it appears only when it is complete.
        train: the factors themselves, or LoRA adapters on them in SVD-LLM's two stages, merged at the end.
        dense: the dense model; by default the one that the report of ``model`` names.
        calibration: ``self``, ``prose``, ``code``, a file or a list of these to train on; by default the text that the
            compression used, at the same length.
        calibration_rows: number of rows.
        calibration_length: tokens per row.
        factor_dtype: the dtype in which the trained factors are stored.
        weight_dtype: the dtype in which the dense weights are stored.
        resume: continue an interrupted run of the same settings.
        force: replace ``out`` if it exists.
        device: torch's name of the device to train on: ``cpu`` or ``cuda``.
        store: a folder for the calibration's tokens, which several runs on one text share, one at a time; also one of
            ``compress``.
        progress: called whenever a fraction of a stage is done.

    The processes that torchrun started share the rows of each step. The first one writes the checkpoint and returns its
    report.

    Raises:
        UserError: the request or the checkpoint is at fault; the message says what to change.
        ProcessLost: another process has ended.
    """
    began = time.perf_counter()
    forget_peak()
    check_device(device)
    settings = {
        "recover": train,
        "factor_dtype": factor_dtype,
        "weight_dtype": weight_dtype,
        "calibration": calibration,
        "calibration_rows": calibration_rows,
        "calibration_length": calibration_length,
    }
    named = [calibration] if isinstance(calibration, str) else calibration or []
    with workspace_of(out, (model, dense, *named, store), resume=resume, force=force) as workspace:
        folder = processes.in_turn(lambda: resolve(model))
        spec, sizes, result = _open(folder)
        config = _config(spec, settings | {"budget": result.get("budget")})
        texts = of_texts(config)
        if calibration is None:
            _check_texts(texts, spec.calibration or {}, folder)
        workspace.protect(folder, *config.text_files, result["model"] if dense is None else None)
        source = Reader(processes.in_turn(lambda: _dense_folder(folder, result["model"], dense, progress)))
        workspace.protect(source.folder)
        weights = of_weights(source) if processes.rank() == 0 else None
        if dense is None:
            _check_weights(weights, result.get("content_of_model"), source.folder, folder)
        processes.in_turn(lambda: _begin(config, texts, workspace, Reader(folder), source, sizes, device))
        shared = SharedStore(store, source, device, config) if store is not None else None
        run = Run(config, workspace, source, device, shared or CalibrationStore(), progress)

        rows, held_out = calibration_tokens(run)
        check_rows(rows, held_out, config)

        def finish(final: Path) -> None:
            if processes.rank() == 0:
                copy_checkpoint(folder, final)
            processes.meet()
            recovery = result["recovery"] = last_steps(run, final, rows)
            result["fidelity"] = compare(run, final, held_out, rows)
            result["bytes"]["compressed"] = Reader(final).total_bytes()
            resumed = recovery["resumed_seconds"] if recovery else 0.0
            result["seconds"] += resumed + time.perf_counter() - began
            result["peak_rss_bytes"] = max(*processes.of_all(peak_rss()), result["peak_rss_bytes"])
            if processes.rank() == 0:
                report.write(result, final)

        result |= config.model_dump(include={"recover", "factor_dtype", "weight_dtype"})
        if dense is not None:
            # The distance is measured from this one.
            result |= {"model": name_of_model(dense), "content_of_model": weights}
        result |= {"format": 3} if config.needs_format_3 else {}
        workspace.finish(finish)
        return result


def last_steps(run: Run, folder: Path, rows: Tensor) -> dict[str, Any] | None:
    """Train the factors of the checkpoint in ``folder`` on ``rows`` and round its weights, as the settings ask.

    Returns:
        The facts of the recovery for the report; None without recovery.
    """
    config, recovery = run.config, None
    if config.recover != "off":
        settings, work = recovery_of(config, run.device), run.workspace.common
        recovery = train_factors(
            folder, rows, settings, run.progress, dense=run.dense.folder, device=run.device, work=work
        )
        recovery["text"] = config.calibration
    if processes.rank() == 0:
        if config.factor_dtype in ("int8", "fp8"):
            round_factors(folder, config.factor_dtype)
        if config.needs_format_3:
            store_low_bits(run, folder, rows)
    processes.meet()
    return recovery


def recovery_of(config: CompressionConfig, device: str) -> Recovery:
    """Return the settings of the recovery: SVD-LLM's two stages of LoRA, or training of the factors themselves.

    The factors train on the rows of one forward pass per step: eight long rows per step would leave very few steps.
    """
    shared = {"seed": config.seed, "autocast": multiplies_bf16(torch.device(device))}
    if config.recover == "lora":
        return Recovery(**shared)
    batch = rows_per_pass(config.calibration_length)
    return Recovery(rank=0, two_stage=False, learning_rate=1e-4, epochs=2, batch=batch, **shared)


def _open(folder: Path) -> tuple[CompressionSpec, ModelConfig, dict[str, Any]]:
    """Return the spec, the config and the report of a checkpoint whose factors can be trained.

    Raises:
        UserError: it is not compressed, or its factors have few bits or were recovered already.
    """
    if not is_compressed(folder):
        raise UserError(f"{folder}: is not compressed, so it has no factors to train; use compress --recover")
    contents = inspect(folder)
    spec = contents.spec
    assert spec is not None
    if not spec.ranks:
        raise UserError(f"{folder}: its weights are rounded only, so it has no factors to train; use compress --ratio")
    for option, stored in (("factor", spec.factors), ("weight", spec.weights)):
        if stored != "model":
            raise UserError(
                f"{folder}: {stored} {option}s cannot be trained; compress without {stored}, then recover with "
                f"--{option}-dtype {stored}"
            )
    result = report.read(folder)
    if result["recovery"] and result["recovery"]["kept"]:
        raise UserError(f"{folder}: its factors were recovered already; start from the checkpoint before its recovery")
    return spec, contents.config, result


def _config(spec: CompressionSpec, settings: dict[str, Any]) -> CompressionConfig:
    """Return the settings of the run; those that are None are taken from the calibration of the compression."""
    text = spec.calibration or {}
    names = {"calibration": "source", "calibration_rows": "rows", "calibration_length": "length", "seed": "seed"}
    fitted = {name: text.get(key) for name, key in names.items()} | {"form": "pivoted" if spec.forms else "two"}
    if "asked_rows" in text:  # which of several texts were divided among, whatever was found
        fitted["calibration_rows"] = text["asked_rows"]
    fitted |= {"refine": "off"}  # that is what compress does, layer by layer
    asked = {name: value for name, value in settings.items() if value is not None}
    if asked.get("factor_dtype") == "int4" and spec.forms:
        raise UserError(
            "factor_dtype int4: pivoted factors lose too much in 4 bits; first run neuronmm convert --form two"
        )
    return CompressionConfig.build(**{**fitted, **asked})


def _check_texts(texts: dict[str, Any], text: dict[str, Any], folder: Path) -> None:
    """Check that the texts hold what they held when ``folder`` was calibrated on them; older checkpoints do not say.

    A release may change the shipped texts; a line on stderr says so.

    Raises:
        UserError: a file has changed.
    """
    before = text.get("content_of_texts")
    for name, digest in texts["content_of_texts"].items():
        if isinstance(before, dict) and digest is not None and before.get(name, digest) != digest:
            changed = f"{name}: has changed since {folder} was calibrated on it"
            if name not in SHIPPED:
                raise UserError(f"{changed}; name the texts with --calibration to train on what they hold now")
            print(f"neuronmm: {changed}, so the rows differ", file=sys.stderr)


def _check_weights(weights: str | None, before: object, dense: Path, folder: Path) -> None:
    """Check that the dense model holds what it held when ``folder`` was made from it; older reports do not say.

    Raises:
        UserError: its weights have changed.
    """
    if None not in (weights, before) and weights != before:
        raise UserError(f"{dense}: its weights are no more those that {folder} was made from; {_GIVE_DENSE}")


def _begin(
    config: CompressionConfig,
    texts: dict[str, Any],
    workspace: Workspace,
    low: Reader,
    dense: Reader,
    sizes: ModelConfig,
    device: str,
) -> None:
    """Check disk and memory, and start or resume the run in ``workspace``; ``low`` reads the compressed checkpoint.

    Raises:
        UserError: there is too little room, or the run to resume had other settings.
    """
    size = low.total_bytes()
    trained = sum(low.parameters(name) for name in low.names if name.endswith(FACTORS))
    if processes.rank() == 0:
        parameters = max(low.total_parameters(), dense.total_parameters())  # the dense model runs first
        check_room(workspace.out, size, size, parameters, trained, working_memory(sizes, config), config, device)
    origin = {"verb": "recover", **of_model(low), "dense": of_model(dense), **of_run(device)}
    workspace.begin({**origin, **config.model_dump(), **texts})


def _dense_folder(folder: Path, recorded: str, asked: str | Path | None, progress: Progress) -> Path:
    """Return the folder of the dense model, ``asked`` or else ``recorded`` in the report of ``folder``.

    Raises:
        UserError: it is missing, compressed, or of another shape than ``folder``.
    """
    try:
        dense = resolve(recorded if asked is None else asked, progress)
    except UserError as error:
        if asked is not None:
            raise
        raise UserError(f"{error}; {_GIVE_DENSE}") from None
    settings, compressed = read_config(dense), read_config(folder)
    if settings.get("quantization_config") is not None:
        raise UserError(f"{dense}: is compressed or quantised itself; {_GIVE_DENSE}")
    other = difference(settings, compressed)
    if other is not None:
        raise UserError(f"{dense}: is not what {folder} was made from ({other}); {_GIVE_DENSE}")
    return dense
