"""How commands draw their progress: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from neuronmm import progress as drawing
from neuronmm.progress import StageLines, stage_progress
from tiny_gguf import write_gguf


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds that the lines see; a test sets its only element."""
    now = [0.0]
    monkeypatch.setattr(drawing.time, "monotonic", lambda: now[0])
    return now


def test_a_stage_prints_a_line_when_it_begins_and_then_one_per_minute(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = StageLines()
    for second in range(1, 131):
        clock[0] = float(second)
        progress("compressing", 1 / 400)
    assert capsys.readouterr().err.splitlines() == [
        "compressing: 0 %",
        "compressing: 15 %, 0:05:39 left",
        "compressing: 30 %, 0:04:39 left",
    ]


def test_the_time_left_does_not_count_what_an_interrupted_run_did(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = StageLines()
    progress("compressing", 0.5)
    for layer in range(1, 3):
        clock[0] = 120.0 * layer
        progress("compressing", 1 / 32)
    assert capsys.readouterr().err.splitlines() == [
        "compressing: 50 %",
        "compressing: 53 %, 0:30:00 left",
        "compressing: 56 %, 0:28:00 left",
    ]


def test_every_stage_has_a_line(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    progress = StageLines()
    progress("batch 1, prompt 32", 0.0)
    clock[0] = 4000.0
    progress("batch 1, prompt 32", 0.25)
    progress("measuring", 1.0)
    progress("measuring", 0.1)
    assert capsys.readouterr().err.splitlines() == [
        "batch 1, prompt 32: 0 %",
        "batch 1, prompt 32: 25 %, 3:20:00 left",
        "measuring: 100 %",
    ]


def test_a_line_per_minute_is_printed_without_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drawing, "_INTERVAL", 0.02)
    lines: list[str] = []

    def wait_for(start: str) -> None:
        for _ in range(2000):  # twenty seconds on a busy machine
            lines.extend(capsys.readouterr().err.splitlines())
            if sum(line.startswith(start) for line in lines) >= 2:
                return
            time.sleep(0.01)
        raise AssertionError(lines)

    threads = threading.active_count()
    with stage_progress() as progress:
        wait_for("working, 0:00:0")
        progress("compressing", 0.0)
        progress("compressing", 0.25)
        wait_for("compressing: 25 %, ")
    assert threading.active_count() == threads


def test_nothing_runs_beside_a_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    threads = threading.active_count()
    with stage_progress(live=False) as progress:
        progress("batch 1, prompt 32", 1.0)
        assert threading.active_count() == threads
    assert capsys.readouterr().err == "batch 1, prompt 32: 100 %\n"


RECIPE = "calibration_rows: 8\ncalibration_length: 16\nalign: 2\nratio: 0.3\n"
LINE = re.compile(r"[a-z][\w ,:]*: \d+ %(, \d+:\d\d:\d\d left)?|neuronmm: warning: .*")


def test_only_our_lines_are_printed_where_there_is_no_terminal(tmp_path: Path) -> None:
    """From a GGUF file, through compression and a sweep: no bar and no notice of another library."""
    write_gguf(tmp_path / "tiny.gguf", family="llama", kind=GGMLQuantizationType.F16)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("!\"#$%&'()*" * 40)
    common = ["tiny.gguf", "--recipe", "recipe.yaml"]
    for words, stages in (
        (["compress", *common, "-o", "low"], {"dequantising", "sampling text", "measuring gradients", "compressing"}),
        (["sweep", *common, "-o", "sweep", "--text", "text.txt", "--ratios", "0.3"], {"measuring", "compressing"}),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "neuronmm", *words, "--json"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "NEURONMM_CACHE": str(tmp_path / "cache")},
        )
        lines = done.stderr.splitlines()
        assert done.returncode == 0, done.stderr
        assert [line for line in lines if not LINE.fullmatch(line)] == []
        assert stages <= {line.partition(": ")[0] for line in lines}


def test_lines_are_printed_where_stderr_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with stage_progress() as progress:
        progress("compressing", 1.0)
    assert capsys.readouterr() == ("", "compressing: 100 %\n")


@pytest.mark.parametrize("live", [True, False])
def test_bars_on_a_terminal_use_a_thread_only_when_live(live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    before = threading.active_count()
    with stage_progress(live) as progress:
        progress("compressing", 0.5)
        assert (threading.active_count() > before) == live
        progress("compressing", 0.5)
    assert "compressing" in sys.stderr.getvalue() and "100%" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_a_command_without_progress_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with stage_progress():
        pass
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
