"""Draw the progress of a command on stderr: bars on a terminal, lines elsewhere, with the time left of each stage."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from neuronmm.models.progress import Progress

_INTERVAL = 60.0  # seconds between two lines about one stage
_ROUNDING = 1e-6  # by which the fractions of a finished stage may miss 1


@contextmanager
def stage_progress(live: bool = True) -> Iterator[Progress]:
    """Yield ``progress(stage, fraction)``, which updates one progress bar per stage.

    Where stderr is not a terminal, each stage prints a line when it begins and one line per minute after that.

    Args:
        live: redraw the bars, and print a line that is due, from a thread. Without it both happen only when
            ``progress`` is called, so that nothing runs beside a measurement.
    """
    from rich.console import Console

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        lines = StageLines()
        with lines.kept_up() if live else nullcontext():
            yield lines
        return
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:>14}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    stages: dict[str, TaskID] = {}
    bars = Bars(*columns, *times, console=console, auto_refresh=live)

    def progress(stage: str, fraction: float) -> None:
        if not stages:
            bars.start()
        if stage not in stages:
            stages[stage] = bars.add_task(stage, total=1 - _ROUNDING)
        bars.advance(stages[stage], fraction)
        bars.refresh()

    try:
        yield progress
    finally:
        if stages:  # without a stage rich would leave an empty line above an error
            bars.stop()


class StageLines:
    """Print progress as lines: stage, per cent done, time left."""

    def __init__(self) -> None:
        self._done: dict[str, float] = {}
        self._first: dict[str, tuple[float, float]] = {}  # the first report of a stage: when, and what was done
        self._printed: dict[str, float] = {}
        self._start = self._last_line = time.monotonic()
        self._stage: str | None = None
        self._lock = threading.Lock()

    def __call__(self, stage: str, fraction: float) -> None:
        """Add ``fraction`` to ``stage``, and print a line if it is due."""
        with self._lock:
            now = time.monotonic()
            self._stage = stage
            self._done[stage] = min(self._done.get(stage, 0.0) + fraction, 1.0)
            self._first.setdefault(stage, (now, self._done[stage]))
            if stage not in self._printed or now - self._printed[stage] >= _INTERVAL:
                self._print(now)

    @contextmanager
    def kept_up(self) -> Iterator[None]:
        """Print a line per minute in the block, also if no progress is reported for longer than that."""
        ended = threading.Event()

        def keep_up() -> None:
            wait = _INTERVAL
            while not ended.wait(wait):
                with self._lock:
                    now = time.monotonic()
                    if now - self._last_line >= _INTERVAL:
                        self._print(now)
                    wait = _INTERVAL - (now - self._last_line)

        thread = threading.Thread(target=keep_up, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _print(self, now: float) -> None:
        """Print a line about the stage that was reported last."""
        self._last_line = now
        if self._stage is None:
            print(f"working, {_minutes(now - self._start)} so far", file=sys.stderr, flush=True)
            return
        stage, done, left = self._stage, self._done[self._stage], ""
        self._printed[stage] = now
        since, before = self._first[stage]
        if before < done < 1 - _ROUNDING:  # an interrupted run may have done the first part
            left = f", {_minutes((now - since) * (1 - done) / (done - before))} left"
        print(f"{stage}: {100 * done:.0f} %{left}", file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    """Return ``h:mm:ss``, as the bars show it."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
