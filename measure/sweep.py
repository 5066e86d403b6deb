"""The verb ``sweep``: methods and ratios compressed and measured one after the other, and laid side by side.

A *point* is a method at a ratio; one with recovery is trained from the point without it where that is there. All that
is done stays in the sweep's folder, so an interrupted sweep goes on where it was, and a finished one can be given
further points and measures. The dense model is measured as the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch

from neuronmm.compression.config import BARE, RENAMED, CompressionConfig
from neuronmm.compression.report import read as read_report
from neuronmm.kernels.durable import replacing
from neuronmm.measure.machine import describe_machine
from neuronmm.measure.pareto import draw_sweep, mark_fronts
from neuronmm.measure.perplexity import read_text
from neuronmm.measure.sweep_folder import claimed, describe
from neuronmm.measure.sweep_making import basis_of, make_point
from neuronmm.measure.sweep_points import add_point, read_points
from neuronmm.measure.sweep_table import as_markdown
from neuronmm.measure.tasks import read_task
from neuronmm.models.documents import write_json
from neuronmm.models.errors import UserError
from neuronmm.models.output import keep_apart, output_folder
from neuronmm.models.source import expanded, resolve


def sweep(
    model: str | Path,
    out: str | Path,
    ratios: Sequence[float],
    methods: Sequence[str],
    texts: Sequence[str | Path],
    base: CompressionConfig | None = None,
    *,
    context: int | None = None,
    limit: int | None = None,
    tasks: Sequence[str | Path] = (),
    questions: int | None = None,
    speed: bool = False,
    resume: bool = False,
    progress: Callable[[str, float], None] = lambda stage, share: None,
) -> dict[str, Any]:
    """Compress ``model`` by every method at every ratio and measure the results; plain values, ready for JSON.

    Args:
        model: the dense model: a folder, a GGUF file or a hub id.
        out: the sweep's folder: the checkpoints, ``sweep.json``, ``sweep.md`` and ``sweep.png``.
        ratios: shares of the targeted weights to remove.
        methods: as :func:`parse_method` reads them.
        texts: files to take the perplexity on.
        base: the settings all points share; by default those of ``compress``, without what a method's words
            can add.
        context: tokens a window; by default as ``evaluate`` chooses.
        limit: only the first windows of each text.
        tasks: files of multiple-choice questions to take the accuracy on, as ``evaluate`` reads them.
        questions: only the first questions of each task.
        speed: measure tokens/s as well, each point beside the dense model.
        resume: ``out`` exists and is to be continued; other ratios and methods than before are new points, further
            texts, tasks where there were none and speed are measured of the points that are there too, and the result
            has them all.
        progress: told of every step: a stage's name and the further share of it that is done.

    Raises:
        UserError: anything about the request or the checkpoint that the caller can mend.
    """
    base, out = base or CompressionConfig.build(**BARE), output_folder(out)
    settings = {name: parse_method(name) for name in methods}
    configs = {
        (name, ratio): CompressionConfig.build(None, **{**base.model_dump(), **own, "ratio": ratio})
        for ratio in ratios
        for name, own in sorted(settings.items(), key=lambda item: "recover" in item[1])  # what it can begin from first
    }
    files = {Path(text).stem: expanded(text).absolute() for text in texts}
    if not configs or len(files) < max(len(texts), 1):
        raise UserError("a sweep needs one or more ratios, methods and texts, the texts of different names")
    for file in files.values():  # a bad path should not cost hours
        read_text(file)
    exams = [expanded(task).absolute() for task in tasks]
    for exam in exams:
        read_task(exam, questions)
    keep_apart(out, [model, base.text_file, *files.values(), *exams])
    run = {
        "texts": {name: str(file) for name, file in files.items()},
        "context": context,
        "limit": limit,
        "tasks": {exam.stem: str(exam) for exam in exams},
        "questions": questions,
        "speed": speed,
        "base": base.model_dump(exclude={"ratio", "method"}),
    }
    with claimed(out, resume):
        return _sweep(model, out, run, configs, settings, base, progress)


def _sweep(
    model: str | Path,
    out: Path,
    run: dict[str, Any],
    configs: dict[tuple[str, float], CompressionConfig],
    settings: dict[str, dict[str, Any]],
    base: CompressionConfig,
    progress: Callable[[str, float], None],
) -> dict[str, Any]:
    """As :func:`sweep`, in a folder that is this process's alone: ``run`` is what is kept of the request."""
    dense = resolve(model)
    keep_apart(out, [dense])
    run = {"model": str(dense), **run}
    describe(out, run)

    folders = {point: out / f"{point[0]}-{point[1]:g}" for point in configs}
    waiting = [folder for folder in folders.values() if not folder.exists()]
    others = [out / point["folder"] for point in read_points(out) if "folder" in point]
    others = [folder for folder in others if folder.is_dir() and folder not in folders.values()]
    steps = 1 + len(configs) + len(others)

    add_point(out, "dense", dense, {"name": "dense", "ratio": 0.0})
    progress("measuring", 1 / steps)
    for (name, ratio), config in configs.items():
        folder = folders[name, ratio]
        if folder in waiting:
            basis = basis_of(out, base, settings[name], ratio)
            make_point(dense, folder, config, basis, _part(progress, len(waiting)))
        report = read_report(folder)
        facts = {key: report[key] for key in ("realised_ratio", "model_ratio", "seconds", "peak_rss_bytes")}
        own = {"name": name, "ratio": ratio, "settings": settings[name], "targets": config.targets}
        add_point(out, folder.name, folder, {**own, "folder": folder.name, **facts})
        progress("measuring", 1 / steps)
    for folder in others:
        add_point(out, folder.name, folder, {})
        progress("measuring", 1 / steps)
    points = read_points(out)
    points.sort(key=lambda point: (point["ratio"], point["name"].count("+"), point["name"]))
    costs = ["bytes", "speed"] if run["speed"] else ["bytes"]
    mark_fronts(points, costs, list(run["texts"]))
    result = {
        "kind": "measured",
        "what": "sweep",
        **run,
        "model": str(model),
        "costs": costs,
        "machine": describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "points": points,
    }
    write_json(out / "sweep.json", result)
    with replacing(out / "sweep.md") as new:
        new.write_text(as_markdown(result), encoding="utf-8")
    with replacing(out / "sweep.png") as new:
        draw_sweep(result, new)
    return result


def parse_method(text: str) -> dict[str, Any]:
    """``anchored+fast`` -> the settings these words stand for.

    A word is a value of a setting that has named values (``whitened``), or the name of a setting that is either off or
    one other thing (``share_a``, or ``share`` as it was named before).

    Raises:
        UserError: a word is unknown, stands for several settings, or contradicts another.
    """
    meanings: dict[str, list[tuple[str, Any]]] = {}
    for name, field in CompressionConfig.model_fields.items():
        values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        for value in values:
            word = name if len(values) == 2 and values[0] == "off" and value == values[1] else value
            meanings.setdefault(str(word), []).append((name, value))
    settings: dict[str, Any] = {}
    for word in text.split("+"):
        found = meanings.get(word) or meanings.get(RENAMED.get(word, word), [])
        if len(found) != 1:
            known = ", ".join(word for word, several in meanings.items() if len(several) == 1)
            raise UserError(f"--methods {text}: {word!r} is not one of {known}")
        ((name, value),) = found
        if name in settings:
            raise UserError(f"--methods {text}: {settings[name]!r} and {word!r} are both a {name}")
        settings[name] = value
    return settings


def _part(progress: Callable[[str, float], None], parts: int) -> Callable[[str, float], None]:
    return lambda stage, share: progress(stage, share / parts)
