"""Kill a run with SIGKILL at random moments and resume it until it is complete, again and again.

After every kill OUT is absent or complete; at the end its bytes are those of a run that nobody killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib.figure  # noqa: F401  (else each killed sweep would spend its time on this import)
import torch
from tally import Finding

from compression_runs import SMALL, config, weights
from neuronmm.compression import fidelity
from neuronmm.compression.config import BARE, CompressionConfig
from neuronmm.compression.pipeline import compress
from neuronmm.compression.recover import recover
from neuronmm.measure.sweep import sweep
from neuronmm.measure.sweep_config import SweepConfig
from tiny_models import make_tiny
from word_tokenizer import word_tokenizer

Files = dict[str, bytes]

TIMES = ("seconds", "peak_rss_bytes", "machine", "model")
"""What a resumed sweep may report otherwise: times and memory, and where the model lies."""


@dataclass(frozen=True)
class Kind:
    """A command that is killed: how it writes ``out`` in a folder with a model, and what must then be in it."""

    run: Callable[[Path, Path, bool], Any]
    content: Callable[[Path], Files]


def prepare(work: Path) -> Path:
    """Write a tiny model, a text and a compressed checkpoint of the model."""
    work.mkdir(parents=True)
    torch.manual_seed(0)
    make_tiny().save_pretrained(work / "model")
    word_tokenizer().save_pretrained(work / "model")
    ids = torch.randint(3, 64, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    (work / "text.txt").write_text(" ".join(f"w{i}" for i in ids))
    return work


def _settings(work: Path, **changes: Any) -> CompressionConfig:
    return config(method="fisher", allocation="global", calibration=str(work / "text.txt"), **changes)


def _compress(**changes: Any) -> Kind:
    def run(work: Path, out: Path, resume: bool) -> None:
        compress(work / "model", out, _settings(work, **changes), resume=resume)

    return Kind(run, _checkpoint)


def _recover(work: Path, out: Path, resume: bool) -> None:
    recover(
        work / "low", out, calibration=str(work / "text.txt"), calibration_rows=6, calibration_length=12, resume=resume
    )


def _sweep(work: Path, out: Path, resume: bool) -> None:
    base = CompressionConfig.build(None, **{**SMALL, **BARE, "calibration": str(work / "text.txt"), "targets": "mlp"})
    points = SweepConfig(
        ratios=[0.2, 0.4], methods=["svd", "fisher"], texts=[work / "text.txt"], base=base, context=30, limit=4
    )
    sweep(work / "model", out, points, resume=resume)


def _checkpoint(out: Path) -> Files:
    return weights(out) if out.exists() else {}


def _points(out: Path) -> Files:
    """Return the checkpoints of a sweep that have their final names, and its results without times."""
    files: Files = {}
    for folder in out.glob("*/"):
        if (folder / "config.json").exists():
            files |= {f"{folder.name}/{name}": content for name, content in weights(folder).items()}
    if (out / "sweep.json").exists():
        files["sweep.json"] = _without_times((out / "sweep.json").read_bytes())
    return files | {name: b"" for name in ("sweep.md", "sweep.png") if (out / name).exists()}  # they have times


def _without_times(document: bytes) -> bytes:
    def stripped(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: stripped(each) for key, each in value.items() if key not in TIMES}
        return [stripped(each) for each in value] if isinstance(value, list) else value

    return json.dumps(stripped(json.loads(document))).encode()


KINDS = {
    "compress, refine off": _compress(),
    "compress, refine fast": _compress(refine="fast"),
    "compress, recovery": _compress(recover="factors"),
    "recover": Kind(_recover, _checkpoint),
    "sweep": Kind(_sweep, _points),
}


def study(kills: int, work: Path, seed: int = 0, plant: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Kill every kind of run ``kills`` times. ``plant`` is called in each process before the run, to plant a fault."""
    prepare(work)
    results = {}
    for name, kind in KINDS.items():
        if name == "recover":
            _child(lambda: compress(work / "model", work / "low", _settings(work))).join()
        results[name] = _killed(kind, kills, work, random.Random(f"{seed} {name}"), plant)
    return results


def _killed(kind: Kind, kills: int, work: Path, draw: random.Random, plant: Callable[[], None]) -> dict[str, Any]:
    lengths = []
    for name in ("first", "whole"):
        shutil.rmtree(work / "out", ignore_errors=True)
        began = time.monotonic()
        run = _child(lambda: kind.run(work, work / "out", False))
        run.join()
        lengths.append(time.monotonic() - began)
        if run.exitcode:
            raise Finding(f"the run that nobody killed ended with status {run.exitcode}")
        (work / "out").rename(work / name)
    expected = kind.content(work / "whole")
    shutil.rmtree(work / "first")
    shutil.rmtree(work / "whole")
    out, partial = work / "out", work / "out.partial"
    counts: Counter[str] = Counter()
    findings: list[str] = []

    def job() -> None:
        plant()
        kind.run(work, out, True)

    while counts["kills"] < kills and not findings:
        run = _child(job)
        run.join(draw.uniform(0, lengths[1]))
        run.kill()
        run.join()
        counts["kills" if run.exitcode == -9 else "runs that ended first"] += 1
        content = kind.content(out)
        if not content:
            counts["kills that left a part" if partial.exists() or out.exists() else "kills that left nothing"] += 1
        if not content.items() <= expected.items():
            findings.append(f"after kill {counts['kills']}: {_differences(content, expected)}")
        elif content.keys() == expected.keys():
            counts["complete"] += 1
            shutil.rmtree(out)
            shutil.rmtree(partial, ignore_errors=True)
        elif run.exitcode not in (0, -9):
            findings.append(f"resuming after kill {counts['kills']} ended with status {run.exitcode}")
    if not findings:
        run = _child(job)
        run.join()
        if run.exitcode or kind.content(out) != expected or partial.exists():
            findings.append(f"at the end: status {run.exitcode}, {_differences(kind.content(out), expected)}")
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(partial, ignore_errors=True)
    return {"seconds_of_a_run": round(lengths[1], 3), **counts, "findings": findings}


def _differences(content: Files, expected: Files) -> list[str]:
    return sorted(name for name in content.keys() | expected.keys() if content.get(name) != expected.get(name))[:5]


def _child(job: Callable[[], Any]) -> Any:
    """Start ``job`` in a forked process, which saves the seconds of the imports."""

    def silent() -> None:
        torch.set_num_threads(1)
        fidelity._NEW_TOKENS = 4  # as in the tests: a short sample of both models' text
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        job()

    process = get_context("fork").Process(target=silent)
    process.start()
    return process
