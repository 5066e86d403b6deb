"""Progress of a long command on stderr: one bar a stage, with the time left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stage_bars(live: bool = True) -> Iterator[Callable[[str, float], None]]:
    """Gives a function of a stage's name and the further share of it that is done, which draws from its first call on.

    With ``live`` False nothing is drawn between two calls: no thread runs beside what is being timed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:>14}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    stages: dict[str, TaskID] = {}
    bar = Progress(*columns, *times, console=Console(file=sys.stderr), auto_refresh=live)

    def progress(stage: str, share: float) -> None:
        if not stages:
            bar.start()
        if stage not in stages:
            stages[stage] = bar.add_task(stage, total=1 - 1e-6)  # the shares are rounded
        bar.advance(stages[stage], share)
        bar.refresh()

    try:
        yield progress
    finally:
        if stages:  # else rich would leave an empty line above the error
            bar.stop()
