"""What a sweep measures of each of its points, kept in its folder as it is made: what is there is not measured again.

A point's file holds its ``bytes``, ``bits`` a weight, ``perplexity`` by text, and where the sweep takes them its
``accuracy`` and ``speed``, beside the facts of its making.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from neuronmm.compression.reader import Reader
from neuronmm.measure.benchmark import benchmark
from neuronmm.measure.evaluate import evaluate
from neuronmm.measure.sweep_folder import RUN
from neuronmm.models.documents import read_own, write_json
from neuronmm.models.errors import UserError

SPEED: dict[str, Any] = {"prompt_lengths": (32,), "new_tokens": 64, "batches": (1,), "runs": 5}
"""What a point's speed is: see :func:`.benchmark.benchmark`."""

_POINT = ".point.json"


def add_point(out: Path, key: str, folder: Path, facts: dict[str, Any]) -> None:
    """Measure the checkpoint in ``folder`` as all of the sweep in ``out`` are, and keep it there under ``key``.

    What was measured before stays. A later :func:`.sweep.sweep` with ``resume`` shows the point, so one made
    elsewhere can be laid beside the sweep's own.

    Args:
        out: the sweep's folder.
        key: a file's name, the point's own.
        folder: the checkpoint.
        facts: what is known of a new point: ``name``, ``ratio``, and but for the dense model ``targets``,
            ``realised_ratio``, ``model_ratio``, ``seconds`` and ``peak_rss_bytes``; with ``bytes`` the size is this.

    Raises:
        UserError: ``out`` is no sweep's folder, or the checkpoint cannot be measured.
    """
    kept = out / f"{key}{_POINT}"
    run = read_own(out / RUN)
    if run is None:
        raise UserError(f"{out}: is not the folder of a sweep ({RUN} is unreadable)")
    before = _read_point(kept)
    point = _measured(facts if before is None else before, folder, run)
    if point != before:
        write_json(kept, point)


def read_points(out: Path) -> list[dict[str, Any]]:
    """All points that the sweep in ``out`` keeps, the dense model's among them, in the order of their files."""
    points = map(_read_point, sorted(out.glob(f"*{_POINT}")))
    return [point for point in points if point is not None]


def _read_point(kept: Path) -> dict[str, Any] | None:
    """What is kept of a point; None, so that it is measured again, if the file is missing or damaged."""
    point = read_own(kept)
    return point if point is not None and point.keys() >= {"name", "ratio"} else None


def _measured(known: dict[str, Any], folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """``known`` and all that the settings ``run`` ask for beyond it."""
    point = dict(known)
    if "bits" not in point:
        reader = Reader(folder)
        sizes = {name: reader.nbytes(name) for name in reader.names}
        point.setdefault("bytes", sum(sizes.values()))
        point["bits"] = 8 * min(size // reader.parameters(name) for name, size in sizes.items())
    perplexity = point["perplexity"] = dict(known.get("perplexity", {}))
    for name, file in run["texts"].items():
        if name not in perplexity:
            done = evaluate(folder, text=file, context=run["context"], limit=run["limit"])
            perplexity[name] = done["results"][0]["models"]["model"]
            point["dtype"] = done["models"]["model"]["dtype"]
    if run["tasks"] and "accuracy" not in point:
        point["accuracy"] = _accuracy(folder, list(run["tasks"].values()), run["questions"])
    if run["speed"] and "speed" not in point:
        point["speed"] = _speed(folder, Path(run["model"]))
    return point


def _accuracy(folder: Path, tasks: list[str], questions: int | None) -> dict[str, Any]:
    """The length-normalised accuracy of each task by name, and their mean with its standard error."""
    results = evaluate(folder, tasks=tasks, limit=questions)["results"]
    found = {
        result["measure"].removesuffix(" acc_norm"): result["models"]["model"]
        for result in results
        if result["measure"].endswith(" acc_norm")
    }
    errors = [figures["standard_error"] or 0.0 for figures in found.values()]
    mean = sum(figures["value"] for figures in found.values()) / len(found)
    return {"value": mean, "standard_error": math.hypot(*errors) / len(found), "tasks": found}


def _speed(folder: Path, dense: Path) -> dict[str, float]:
    """Decoding beside the dense model, tokens/s."""
    (found,) = benchmark(folder, None if folder == dense else dense, **SPEED)["points"]
    own = found["variants"]["dense" if folder == dense else "fused"]
    beside = found["variants"]["dense"]["decode_tokens_per_second"]
    return {
        "tokens_per_second": own["decode_tokens_per_second"],
        "slowest": 1 / own["tpot"]["max"],
        "fastest": 1 / own["tpot"]["min"],
        "dense_beside": beside,
        "speed_up": own["decode_tokens_per_second"] / beside,
    }
