"""The verb ``sweep``: methods and ratios compressed and measured one after the other, and laid side by side.

A *point* is a method at a ratio; one with recovery is trained from the point without it where that is there. All that
is done stays in the sweep's folder, so an interrupted sweep goes on where it was, and a finished one can be given
further points and measures. The dense model is measured as the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch

from neuronmm.compression.config import BARE, CompressionConfig
from neuronmm.compression.report import read as read_report
from neuronmm.engine.machine import describe_machine
from neuronmm.engine.pareto import draw_sweep, mark_fronts
from neuronmm.engine.perplexity import read_text
from neuronmm.engine.tasks import read_task
from neuronmm.models.errors import UserError
from neuronmm.models.portable import write_json
from neuronmm.models.source import expanded, resolve
from neuronmm.sweep_making import basis_of, make_point
from neuronmm.sweep_points import RUN, add_point, read_points, replace_json
from neuronmm.sweep_table import as_markdown


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
    base, out = base or CompressionConfig.build(**BARE), expanded(out).absolute()
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
    dense = resolve(model)
    run = {
        "model": str(dense),
        "texts": {name: str(file) for name, file in files.items()},
        "context": context,
        "limit": limit,
        "tasks": {exam.stem: str(exam) for exam in exams},
        "questions": questions,
        "speed": speed,
        "base": base.model_dump(exclude={"ratio", "method"}),
    }
    _open(out, run, resume)

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
    costs = ["bytes", "speed"] if speed else ["bytes"]
    mark_fronts(points, costs, list(files))
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
    (out / "sweep.md").write_text(as_markdown(result), encoding="utf-8")
    draw_sweep(result, out / "sweep.png")
    return result


def parse_method(text: str) -> dict[str, Any]:
    """``anchored+fast`` -> the settings these words stand for.

    A word is a value of a setting that has named values (``whitened``), or the name of a setting that is either off or
    one other thing (``share``).

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
        found = meanings.get(word, [])
        if len(found) != 1:
            known = ", ".join(word for word, several in meanings.items() if len(several) == 1)
            raise UserError(f"--methods {text}: {word!r} is not one of {known}")
        ((name, value),) = found
        if name in settings:
            raise UserError(f"--methods {text}: {settings[name]!r} and {word!r} are both a {name}")
        settings[name] = value
    return settings


def _open(out: Path, run: dict[str, Any], resume: bool) -> None:
    """Make the sweep's folder, or check that it is one of the same settings; measures may have been added to them."""
    plan = out / RUN
    if not out.exists():
        out.mkdir(parents=True)
        write_json(plan, run)
        return
    if not resume:
        raise UserError(f"{out}: exists already; --resume continues the sweep in it, or give another -o")
    try:
        before = json.loads(plan.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        raise UserError(f"{out}: is not the folder of a sweep ({plan.name} is unreadable); give another -o") from None
    run = json.loads(json.dumps(run))
    known = {name: file for name, file in run["texts"].items() if name in before.get("texts", ())}
    comparable = {**run, "texts": known}
    if before.get("tasks") == {}:
        comparable.update(tasks={}, questions=before["questions"])
    if before.get("speed") is False:
        comparable.update(speed=False)
    for key, value in comparable.items():
        if before.get(key) != value:
            raise UserError(f"{out}: was started with another {key} ({before.get(key)!r}, now {run[key]!r})")
    if run != before:
        replace_json(plan, run)


def _part(progress: Callable[[str, float], None], parts: int) -> Callable[[str, float], None]:
    return lambda stage, share: progress(stage, share / parts)
