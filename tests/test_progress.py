"""How commands draw their progress: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from neuronmm import progress as drawing
from neuronmm.progress import StageLines, stage_progress


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
        "compressing: 0 %, 0:06:39 left",
        "compressing: 15 %, 0:05:39 left",
        "compressing: 30 %, 0:04:39 left",
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
