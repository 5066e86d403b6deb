"""Run a command on a bad input inside this process, and count how the inputs of a study ended."""

from __future__ import annotations

import io
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neuronmm.cli import main

SECONDS = 20
"""Processor time after which a command on a tiny model counts as a hang, however busy the machine is."""


TAKEN = ""
"""What a check returns for an input that was only looked at, and not refused."""


class Hang(BaseException):
    """Not an Exception, so that no code turns it into a one-line error."""


class Finding(AssertionError):
    """A traceback, a hang, a wrong result or an unclear error: what a study looks for."""


@dataclass
class Tally:
    """How the inputs of one study ended: in a right result, in one clear line, or as a finding."""

    results: int = 0
    taken: int = 0
    refusals: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        """The number of inputs."""
        return self.results + self.taken + self.refusals + len(self.findings)

    def add(self, name: str, check: Callable[[], str | None]) -> None:
        """Count one input. ``check`` returns None for a right result, TAKEN, or the line that refuses the input."""
        try:
            with time_limit():
                line = check()
        except KeyboardInterrupt:
            raise
        except (Exception, SystemExit, Hang) as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in frames if "site-packages" not in frame.filename]
            where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
            self.findings.append(f"{name}: {type(error).__name__}: {error} ({where})"[:1000])
            print(f"finding: {self.findings[-1]}", file=sys.stderr, flush=True)
            return
        if line is None:
            self.results += 1
        elif line == TAKEN:
            self.taken += 1
        else:
            self.refusals += 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        counts = {"inputs": self.inputs, "right_results": self.results, "taken_but_not_run": self.taken}
        return {**counts, "one_clear_line": self.refusals, "findings": self.findings}


def command(words: list[str]) -> tuple[str | None, str]:
    """Run ``neuronmm WORDS`` in this process and return the error line, None on success, and the output.

    Raises:
        Finding: the command ended in another way than with its result or one clear line.
    """
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(words)
    if status == 0:
        return None, out.getvalue()
    if status == 130:  # Ctrl-C, which no file can cause
        raise KeyboardInterrupt
    line = err.getvalue().rstrip("\n").split("\n")[-1]
    clear = (
        line.startswith(f"neuronmm {words[0]}: error: ") and line.isprintable() and "Traceback" not in err.getvalue()
    )
    if status not in (1, 2) or out.getvalue() or not clear:
        raise Finding(f"status {status}, stdout {out.getvalue()[:200]!r}, stderr {err.getvalue()[-500:]!r}")
    return line, ""


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise :class:`Hang` if the block takes more than :data:`SECONDS` of processor time."""

    def end(*_: Any) -> None:
        raise Hang(f"still at work after {SECONDS} seconds")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def memory_growth() -> Iterator[dict[str, int]]:
    """Measure by how many bytes the block raises the peak memory of this process."""
    grown: dict[str, int] = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield grown
    grown["bytes"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
