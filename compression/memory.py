"""How much memory a run took."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path


def peak_rss() -> int:
    """The largest resident memory of this process so far, or since :func:`forget_peak`, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> None:
    """Let :func:`peak_rss` count from here, for one process may make several runs; only Linux can (proc(5))."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
