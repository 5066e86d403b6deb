"""Several processes share the calibration rows: the same checkpoint as one process, within rounding."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from compression_runs import EVERYTHING, config, tensors, weights
from neuronmm.compression.pipeline import compress
from neuronmm.models import UserError, processes
from neuronmm.models.load import load_pretrained
from several import call, free_port, in_processes, torchrun
from tiny_models import make_tokens

ROWS = {"calibration_rows": 27, "calibration_length": 16, "align": 2}
CASES: dict[str, dict[str, Any]] = {
    "whitened": {"method": "whitened", "form": "pivoted"},
    "asvd": {"method": "asvd", "allocation": "global"},
    "fisher": {"method": "fisher", "allocation": "global", "share_a": "auto", "targets": "all"},
    "anchored": {"method": "anchored"},
    "fisher-refined": {"method": "fisher", "allocation": "global", "refine": "fast", "form": "pivoted"},
    "anchored-refined": EVERYTHING,
    "budget": {"method": "fisher", "allocation": "global", "budget": 0.5, "form": "pivoted"},
}


def settings(changes: dict[str, Any], text: Path) -> Any:
    return config(**{**ROWS, "calibration": str(text), **changes})


def run_all(source: Path, home: Path, text: Path, names: tuple[str, ...]) -> None:
    home.mkdir(exist_ok=True)
    for name in names:
        compress(source, home / name, settings(CASES[name], text))


def logits(folder: Path) -> torch.Tensor:
    return load_pretrained(folder, torch.float32)(make_tokens(4, 20)).logits.detach()


def assert_same(source: Path, one: Path, two: Path, refined: bool) -> None:
    """Compare the checkpoints of one and of two processes."""
    first, second = (json.loads((out / "config.json").read_text()) for out in (one, two))
    assert first == second  # ratio, ranks, forms and pivots
    assert tensors(one).keys() == tensors(two).keys()
    dense, expected, got = (logits(folder) for folder in (source, one, two))
    distance, lost = (expected - got).norm(), (expected - dense).norm()
    assert distance < (0.1 * lost if refined else 1e-3 * dense.norm())
    alone, shared = (json.loads((out / "compression_report.json").read_text()) for out in (one, two))
    assert shared["mean_relative_error"] == pytest.approx(alone["mean_relative_error"], rel=1e-4)
    assert shared["fidelity"]["distance"] == pytest.approx(alone["fidelity"]["distance"], rel=1e-2)
    if refined:
        for when in ("before", "after"):
            assert shared["block_loss"][when] == pytest.approx(alone["block_loss"][when], rel=2e-2)
        assert shared["block_loss"]["after"] < shared["block_loss"]["before"]


@pytest.mark.parametrize(
    "names", [("fisher", "anchored-refined"), pytest.param(tuple(CASES), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_two_processes_write_the_checkpoint_of_one(
    names: tuple[str, ...], dense: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    source = dense()
    run_all(source, tmp_path / "one", text, names)
    in_processes(2, run_all, source, tmp_path / "two", text, names)
    for name in names:
        assert_same(source, tmp_path / "one" / name, tmp_path / "two" / name, "refined" in name)
        assert not (tmp_path / "two" / f"{name}.partial").exists()


def interrupted(source: Path, out: Path, text: Path, stage: str, count: int) -> None:
    """Process 1 is killed when it begins fraction ``count`` of ``stage``; the other one writes down what it is told."""
    left = [count]

    def progress(name: str, fraction: float) -> None:
        left[0] -= name == stage
        if left[0] < 0 and processes.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        compress(source, out, settings(CASES["fisher-refined"], text), progress=progress)
    except processes.ProcessLost as error:
        out.with_suffix(".lost").write_text(str(error))


def resumed(source: Path, out: Path, text: Path) -> None:
    compress(source, out, settings(CASES["fisher-refined"], text), resume=True)


@pytest.mark.parametrize(
    ("stage", "count"), [("compressing", 4), pytest.param("measuring gradients", 3, marks=pytest.mark.slow)]
)
def test_the_death_of_a_process_ends_the_run_and_resume_finishes_it(
    stage: str, count: int, dense: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    """The first process says so at once. The longer test compares bytes with those of an undisturbed run."""
    source, out, port = dense(), tmp_path / "out", free_port()
    context = get_context("spawn")
    started = [
        context.Process(target=call, args=(rank, 2, port, interrupted, (source, out, text, stage, count)))
        for rank in range(2)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(600)
    assert [process.exitcode for process in started] == [0, -signal.SIGKILL]
    assert "has ended" in out.with_suffix(".lost").read_text()
    assert not out.exists()
    with pytest.raises(UserError, match="another processes"):
        resumed(source, out, text)
    in_processes(2, resumed, source, out, text)
    compress(source, tmp_path / "one", settings(CASES["fisher-refined"], text))
    assert_same(source, tmp_path / "one", out, refined=True)
    if stage == "measuring gradients":
        in_processes(2, resumed, source, tmp_path / "whole", text)
        assert weights(out) == weights(tmp_path / "whole")


@pytest.mark.slow
def test_torchrun_refuses_in_one_line(dense: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    done = torchrun(2, "compress", dense(), "-o", tmp_path / "out", "--calibration", text, "--recover", "factors")
    assert done.returncode != 0 and done.stdout == "" and not (tmp_path / "out.partial").exists()
    assert done.stderr.count("neuronmm recover on the result") == 1
