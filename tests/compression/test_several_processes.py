"""Several processes share the calibration rows: the same checkpoint as one process, within rounding."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from compression_runs import EVERYTHING, config, tensors, weights
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.factor_training import Recovery
from neuronmm.compression.pipeline import compress
from neuronmm.compression.recover import recover, recovery_of
from neuronmm.compression.workspace import work_folder
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
    "budget": {"method": "fisher", "allocation": "global", "budget": 0.5, "ratio": None, "form": "pivoted"},
}

TRAINED = {"method": "whitened", "targets": "all", "calibration_rows": 97}
"""Before a recovery: with fewer rows it is chance whether training helps the held-out ones."""


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


def faster(settings: CompressionConfig, device: str, batch: int = 5) -> Recovery:
    """Steps that change a tiny model, of five rows, which two processes cannot halve.

    In float32: in bf16, where the processor multiplies it, the rounding depends on the rows that a process has.
    """
    return recovery_of(settings, device).model_copy(update={"learning_rate": 1e-3, "batch": batch, "autocast": False})


def recovered(low: Path, out: Path, train: Any = "factors", **options: Any) -> dict[str, Any]:
    with patch("neuronmm.compression.recover.recovery_of", faster):
        return recover(low, out, train, **options)


def recover_both(low: Path, source: Path, home: Path, text: Path) -> None:
    home.mkdir(exist_ok=True)
    for train in ("factors", "lora"):
        recovered(low, home / train, train)
    with patch("neuronmm.compression.recover.recovery_of", partial(faster, batch=1)):  # one process has no row
        compress(source, home / "compressed", settings({**TRAINED, "recover": "factors", "weight_dtype": "int4"}, text))


def test_two_processes_train_the_factors_as_one_does(dense: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    source, low = dense(), tmp_path / "low"
    compress(source, low, settings(TRAINED, text))
    recover_both(low, source, tmp_path / "one", text)
    in_processes(2, recover_both, low, source, tmp_path / "two", text)
    for name in ("factors", "lora", "compressed"):
        one, two = tmp_path / "one" / name, tmp_path / "two" / name
        alone, shared = (json.loads((out / "compression_report.json").read_text())["recovery"] for out in (one, two))
        for key in ("loss_before", "loss_after"):
            assert shared[key] == pytest.approx(alone[key], rel=1e-4)
        assert shared["loss_after"] < 0.99 * shared["loss_before"] and shared["rows"] == alone["rows"]
        if name != "compressed":
            expected, got = logits(one), logits(two)
            assert (expected - got).norm() < 0.01 * (expected - logits(low)).norm()
    assert weights(tmp_path / "two" / "compressed").keys() == weights(tmp_path / "one" / "compressed").keys()


def state_file(out: Path, state: str) -> Path:
    return work_folder(out) / f"{state}.safetensors"


def interrupted(run: Callable[..., Any], out: Path, stage: str, count: int, state: str) -> None:
    """Process 1 is killed ``count`` fractions of ``stage`` after ``state`` is there; the other notes what it is told.

    How many fractions come before that depends on the ranks, and they on the processor.
    """
    left = [count]

    def progress(name: str, fraction: float) -> None:
        left[0] -= name == stage and state_file(out, state).is_file()
        if left[0] < 0 and processes.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        run(out, progress=progress)
    except processes.ProcessLost as error:
        out.with_suffix(".lost").write_text(str(error))


def compressed(source: Path, text: Path, out: Path, **options: Any) -> None:
    compress(source, out, settings(CASES["fisher-refined"], text), **options)


def kill_and_resume(run: Callable[..., Any], out: Path, stage: str, count: int, state: str) -> None:
    """Kill one of two processes; the other one says so at once. Two others then finish the run from the ``state``."""
    context, port = get_context("spawn"), free_port()
    started = [
        context.Process(target=call, args=(rank, 2, port, interrupted, (run, out, stage, count, state)))
        for rank in range(2)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(600)
    assert [process.exitcode for process in started] == [0, -signal.SIGKILL]
    assert "has ended" in out.with_suffix(".lost").read_text()
    assert not out.exists() and state_file(out, state).is_file()
    with pytest.raises(UserError, match="another number of processes"):
        run(out, resume=True)
    in_processes(2, partial(run, resume=True), out)


@pytest.mark.parametrize(
    ("stage", "count", "state"),
    [
        ("compressing", 0, "layer-00000"),
        pytest.param("measuring gradients", 3, "calibration", marks=pytest.mark.slow),
    ],
)
def test_the_death_of_a_process_ends_the_run_and_resume_finishes_it(
    stage: str, count: int, state: str, dense: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    """The longer test compares bytes with those of an undisturbed run."""
    source, out = dense(), tmp_path / "out"
    run = partial(compressed, source, text)
    kill_and_resume(run, out, stage, count, state)
    run(tmp_path / "one")
    assert_same(source, tmp_path / "one", out, refined=True)
    if stage == "measuring gradients":
        in_processes(2, run, tmp_path / "whole")
        assert weights(out) == weights(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("train", "count", "state"), [("factors", 5, "recovery-AB"), ("lora", 5, "recovery-A")])
def test_the_death_of_a_process_that_trains_is_resumed_to_the_same_bytes(
    train: str, count: int, state: str, dense: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    """The run continues from the state after an epoch, of LoRA's second stage."""
    low, out = tmp_path / "low", tmp_path / "out"
    compress(dense(), low, settings(TRAINED, text))
    run = partial(recovered, low, train=train)
    kill_and_resume(run, out, "recovering", count, state)
    in_processes(2, run, tmp_path / "whole")
    assert weights(out) == weights(tmp_path / "whole")


@pytest.mark.slow
def test_torchrun_refuses_in_one_line(dense: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    done = torchrun(2, "compress", dense(), "-o", tmp_path / "out", "--method", "svd")
    assert done.returncode != 0 and done.stdout == "" and not (tmp_path / "out.partial").exists()
    assert done.stderr.count("plain SVD has no rows") == 1


@pytest.mark.slow
def test_torchrun_recovers(dense: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    low, out = tmp_path / "low", tmp_path / "out"
    compress(dense(), low, settings(TRAINED, text))
    done = torchrun(2, "recover", low, "-o", out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recovery"]["rows"]["held_out"] == 13 and out.is_dir()
