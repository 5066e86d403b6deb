"""The points of a sweep: create the checkpoint of each, measure it, and store the results in the sweep's folder.

A point's file holds its ``bytes``, its ``bits`` per weight, its ``perplexity`` by text and, where the sweep measures
them, its ``accuracy`` and ``speed``, beside the facts of its compression. A result in the file is not measured again.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict, cast

from neuronmm.compression.config import CompressionConfig, renamed
from neuronmm.compression.pipeline import compress
from neuronmm.compression.reader import Reader
from neuronmm.compression.recover import recover
from neuronmm.compression.workspace import RUN, work_folder
from neuronmm.measure.benchmark import run_benchmark
from neuronmm.measure.benchmark_result import BenchmarkResult
from neuronmm.measure.config import BenchmarkConfig, EvaluationConfig
from neuronmm.measure.evaluate import run_evaluation
from neuronmm.measure.statistics import Estimate
from neuronmm.measure.sweep_config import PlannedPoint
from neuronmm.measure.sweep_folder import SweepSettings, read_settings
from neuronmm.models.contents import inspect
from neuronmm.models.documents import read_own, write_json
from neuronmm.models.progress import Progress

SPEED: dict[str, Any] = {"prompt_lengths": (32,), "new_tokens": 64, "batches": (1,), "runs": 5}
"""The benchmark that gives a point's speed."""

_POINT = ".point.json"
_RECOVERY = {"recover", "factor_dtype", "weight_dtype"}  # settings that `recover` can apply to a finished checkpoint


class SweepPoint(TypedDict, total=False):
    """The JSON object of a point. Facts that are unknown and measures that were not taken are absent.

    ``name`` and ``ratio`` are always there; ``targets`` if linears are factorised; ``fronts`` only in a result.
    ``perplexity`` and ``accuracy`` hold a ``value`` and a ``standard_error``.
    """

    name: str
    ratio: float
    settings: dict[str, Any]
    targets: str
    folder: str
    realised_ratio: float
    model_ratio: float
    seconds: float
    peak_rss_bytes: int
    bytes: int
    bits: int
    perplexity: dict[str, dict[str, Any]]
    dtype: str
    accuracy: dict[str, Any]
    speed: dict[str, float]
    fronts: list[str]


def create_point(
    dense: Path, out: Path, point: PlannedPoint, base: CompressionConfig, device: str, progress: Progress
) -> None:
    """Create the checkpoint of one sweep point, or continue where its creation was interrupted.

    A point that only adds recovery starts from the compressed point, if the sweep in ``out`` has that.
    """
    config, folder, store = point.config, out / point.folder, out / "calibration"
    start, interrupted = _start(out, point, base), read_own(work_folder(folder) / RUN)
    if start is None or (interrupted is not None and interrupted.get("verb") != "recover"):
        compress(dense, folder, config, resume=True, device=device, store=store, progress=progress)
        return
    progress("compressing", 1.0)
    assert config.recover != "off"
    recover(
        start,
        folder,
        config.recover,
        dense=dense,
        calibration=config.calibration,
        calibration_rows=config.calibration_rows,
        calibration_length=config.calibration_length,
        factor_dtype=config.factor_dtype,
        weight_dtype=config.weight_dtype,
        resume=True,
        device=device,
        store=store,
        progress=progress,
    )


def _start(out: Path, planned: PlannedPoint, base: CompressionConfig) -> Path | None:
    """Return the checkpoint of the point in ``out`` that differs from ``planned`` by recovery alone."""
    started = base.recover != "off" or base.factor_dtype != "model" or base.weight_dtype != "model"
    if "recover" not in planned.settings or started:
        return None
    ratio = planned.config.ratio
    settings = {name: value for name, value in planned.settings.items() if name not in _RECOVERY}
    if not CompressionConfig.build(None, **{**base.model_dump(), **settings, "ratio": ratio}).needs_text:
        return None  # its checkpoint does not name the text to train on
    for point in read_points(out):
        same = point["ratio"] == ratio and renamed(point.get("settings", {}), notice=False) == settings
        if same and "settings" in point and (out / point["folder"]).is_dir():
            return out / str(point["folder"])
    return None


def add_point(out: Path, key: str, folder: Path, facts: SweepPoint) -> None:
    """Measure the checkpoint in ``folder`` with the settings of the sweep in ``out`` and store the point there.

    Stored results are not measured again. A later resumed :func:`.sweep.sweep` shows the point, so a checkpoint
    created elsewhere can be compared with the sweep's own.

    Args:
        out: the sweep's folder.
        key: the name of the point's file.
        folder: the checkpoint.
        facts: the known facts of a new point: ``name`` and ``ratio``, and for a compressed model ``targets``,
            ``realised_ratio`` and ``model_ratio``; and ``seconds`` and ``peak_rss_bytes``, both or neither. ``bytes``
            replaces the measured size.

    Raises:
        UserError: ``out`` is not the folder of a sweep, or the checkpoint cannot be measured.
    """
    file = out / f"{key}{_POINT}"
    settings, before = read_settings(out), _read_point(file)
    point = _measure(facts if before is None else before, folder, settings)
    if point != before:
        write_json(file, dict(point))


def read_points(out: Path) -> list[SweepPoint]:
    """Return all points that are stored in the sweep's folder ``out``, also the dense model's, sorted by file name."""
    points = map(_read_point, sorted(out.glob(f"*{_POINT}")))
    return [point for point in points if point is not None]


def _read_point(file: Path) -> SweepPoint | None:
    """Return the point in ``file``; None, so that it is measured again, if the file is missing or damaged."""
    point = read_own(file)
    return cast(SweepPoint, point) if point is not None and point.keys() >= {"name", "ratio"} else None


def _measure(known: SweepPoint, folder: Path, settings: SweepSettings) -> SweepPoint:
    """Return ``known`` with all missing measures of ``settings``."""
    point = known.copy()
    if "bits" not in point:
        reader = Reader(folder)
        sizes = {name: reader.nbytes(name) for name in reader.names}
        point.setdefault("bytes", sum(sizes.values()))
        spec = inspect(folder).spec
        int4 = spec is not None and "int4" in (spec.weights, spec.factors)  # two of its elements share a byte
        point["bits"] = 4 if int4 else 8 * min(size // reader.parameters(name) for name, size in sizes.items())
    perplexity = point["perplexity"] = dict(known.get("perplexity", {}))
    for name, file in settings.texts.items():
        if name not in perplexity:
            config = EvaluationConfig(folder, text=file, context=settings.context, limit=settings.limit)
            result = run_evaluation(config)
            perplexity[name] = asdict(result.of_model()["perplexity"])
            point["dtype"] = result.models["model"].dtype
    if settings.tasks and "accuracy" not in point:
        point["accuracy"] = _accuracy(folder, list(settings.tasks.values()), settings.questions)
    if settings.speed and "speed" not in point:
        point["speed"] = _speed(folder, Path(settings.model))
    return point


def _accuracy(folder: Path, tasks: list[str], questions: int | None) -> dict[str, Any]:
    """Return the length-normalised accuracy of each task by name, and their mean with its standard error."""
    estimates = run_evaluation(EvaluationConfig(folder, tasks=tasks, limit=questions)).of_model()
    suffix = " acc_norm"
    by_task = {measure.removesuffix(suffix): entry for measure, entry in estimates.items() if measure.endswith(suffix)}
    errors = [entry.standard_error for entry in by_task.values() if entry.standard_error is not None]
    mean = sum(entry.value for entry in by_task.values()) / len(by_task)
    total = Estimate(mean, math.hypot(*errors) / len(by_task) if len(errors) == len(by_task) else None)
    return {**asdict(total), "tasks": {name: asdict(entry) for name, entry in by_task.items()}}


def _speed(folder: Path, dense: Path) -> dict[str, float]:
    """Return the decoding speed in tokens/s, and that of the dense model in the same benchmark."""
    result = run_benchmark(BenchmarkConfig(folder, None if folder == dense else dense, **SPEED))
    assert isinstance(result, BenchmarkResult)
    variants = result.points[0].variants
    figures = variants["dense" if folder == dense else "fused"]
    dense_speed = variants["dense"].decode_tokens_per_second
    return {
        "tokens_per_second": figures.decode_tokens_per_second,
        "slowest": 1 / figures.tpot.max,
        "fastest": 1 / figures.tpot.min,
        "dense_beside": dense_speed,
        "speed_up": figures.decode_tokens_per_second / dense_speed,
    }
