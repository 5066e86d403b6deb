"""The verb ``sweep``: compress a model by several methods and ratios, measure every result and compare them.

A *point* is a method at a ratio. The dense model is measured as the reference. All results are stored in the sweep's
folder, so an interrupted sweep can be resumed and a finished one extended by points and measures.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from neuronmm.compression.calibration import from_text
from neuronmm.compression.config import SELF
from neuronmm.compression.pipeline import open_dense
from neuronmm.compression.plan import make_plan, targeted
from neuronmm.compression.report import read as read_report
from neuronmm.compression.run import check_device
from neuronmm.kernels.durable import replacing
from neuronmm.measure.machine import Machine, describe_machine
from neuronmm.measure.pareto import draw_sweep, mark_fronts
from neuronmm.measure.perplexity import cut, read_text
from neuronmm.measure.sweep_config import PlannedPoint, SweepConfig
from neuronmm.measure.sweep_folder import SweepSettings, claimed, write_settings
from neuronmm.measure.sweep_points import SweepPoint, add_point, create_point, read_points
from neuronmm.measure.sweep_table import as_markdown
from neuronmm.measure.tasks import Question, encode, read_task
from neuronmm.models.documents import write_json
from neuronmm.models.load import load_config, load_tokenizer, positions_of
from neuronmm.models.output import keep_apart, output_folder
from neuronmm.models.progress import Progress, no_progress
from neuronmm.models.source import resolve, short_name


@dataclass
class SweepResult:
    """All points of a sweep's folder. ``model``: as given to :func:`sweep`. ``costs``: ``bytes``, perhaps ``speed``."""

    model: str
    settings: SweepSettings
    costs: list[str]
    machine: Machine
    points: list[SweepPoint]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document."""
        values = {**self.settings.to_json(), "model": self.model, "costs": self.costs}
        return {"kind": "measured", "what": "sweep", **values, "machine": asdict(self.machine), "points": self.points}


def sweep(
    model: str | Path,
    out: str | Path,
    config: SweepConfig,
    *,
    resume: bool = False,
    device: str = "cpu",
    progress: Progress = no_progress,
) -> SweepResult:
    """Compress ``model`` by every method at every ratio and measure the results.

    Args:
        model: the dense model: a folder, a GGUF file or a hub id.
        out: the sweep's folder for the checkpoints, ``sweep.json``, ``sweep.md`` and ``sweep.png``.
        config: the points and the measures.
        resume: continue the sweep in ``out``. New ratios and methods add points. New texts, the first tasks, and speed
            are also measured for the earlier points. The result holds all points.
        device: torch's name of the device that compresses: ``cpu`` or ``cuda``. Points that share the
            calibration need the same one.
        progress: called whenever a fraction of a stage is done.

    Raises:
        UserError: the request is invalid, or a checkpoint cannot be created or measured.
    """
    check_device(device)
    out = output_folder(out)
    texts, tasks = config.text_files.values(), config.task_files.values()
    contents = [read_text(file) for file in texts]  # what is wrong is said before hours of work
    questions = [row for file in tasks for row in read_task(file, config.questions)]
    keep_apart(out, [model, *config.base.text_files, *texts, *tasks])
    with claimed(out, resume):
        dense = resolve(model, progress)
        keep_apart(out, [dense])
        _check_points(dense, config)
        _check_sizes(dense, config, contents, questions)
        settings = SweepSettings.of(config, dense)
        write_settings(out, settings)
        _fill(out, dense, config, device, progress)
        result = _collect(out, str(model), settings)
        write_json(out / "sweep.json", result.to_json())
        with replacing(out / "sweep.md") as new:
            new.write_text(as_markdown(result), encoding="utf-8")
        with replacing(out / "sweep.png") as new:
            draw_sweep(result.points, result.costs, list(settings.texts), short_name(result.model), new)
        return result


def _check_points(dense: Path, config: SweepConfig) -> None:
    """Check that the model is dense and has linears of which the points can remove a part.

    Raises:
        UserError: it has not.
    """
    reader, contents = open_dense(dense)
    for point in config.points:
        make_plan(targeted(reader, contents.config.num_hidden_layers, point.config), point.config)


def _check_sizes(dense: Path, config: SweepConfig, texts: list[str], questions: list[Question]) -> None:
    """Check that the windows of the texts and the questions fit the model, and that calibration texts have a row.

    Raises:
        UserError: one does not.
    """
    tokenizer, context = load_tokenizer(dense), positions_of(load_config(dense))
    for text in texts:
        cut(tokenizer, text, context, context=config.context, limit=config.limit)
    for question in questions:
        encode(tokenizer, question, context)
    if any(point.config.needs_text for point in config.points):
        for name in config.base.texts:
            if name != SELF:
                from_text(name, tokenizer, replace(config.base.rows, count=1))


def _fill(out: Path, dense: Path, config: SweepConfig, device: str, progress: Progress) -> None:
    """Create and measure the points of ``config``, and measure the earlier points in ``out``."""
    planned = {out / point.folder: point for point in config.points}
    missing = [folder for folder in planned if not folder.exists()]
    earlier = [out / point["folder"] for point in read_points(out) if "folder" in point]
    earlier = [folder for folder in earlier if folder.is_dir() and folder not in planned]
    steps = 1 + len(planned) + len(earlier)

    def create_progress(stage: str, fraction: float) -> None:
        progress(stage, fraction / len(missing))

    progress("measuring", 0.0)
    add_point(out, "dense", dense, {"name": "dense", "ratio": 0.0})
    progress("measuring", 1 / steps)
    for folder, point in planned.items():
        if folder in missing:
            create_point(dense, out, point, config.base, device, create_progress)
            progress("measuring", 0.0)  # the stage that a line per minute names from here on
        add_point(out, folder.name, folder, _facts(point, folder))
        progress("measuring", 1 / steps)
    for folder in earlier:
        add_point(out, folder.name, folder, {})
        progress("measuring", 1 / steps)


def _facts(point: PlannedPoint, folder: Path) -> SweepPoint:
    report = read_report(folder)
    facts: SweepPoint = {"name": point.name, "ratio": point.config.ratio, "settings": point.settings}
    if point.config.factorises:
        facts["targets"] = point.config.targets
    return {
        **facts,
        "folder": folder.name,
        "realised_ratio": report["realised_ratio"],
        "model_ratio": report["model_ratio"],
        "seconds": report["seconds"],
        "peak_rss_bytes": report["peak_rss_bytes"],
    }


def _collect(out: Path, model: str, settings: SweepSettings) -> SweepResult:
    """Return all points in ``out``, sorted by ratio, and mark those on the Pareto fronts."""
    points = read_points(out)
    points.sort(key=lambda point: (point["ratio"], point["name"].count("+"), point["name"]))
    costs = ["bytes", "speed"] if settings.speed else ["bytes"]
    mark_fronts(points, costs, list(settings.texts))
    machine = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return SweepResult(model, settings, costs, machine, points)
