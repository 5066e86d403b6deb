"""Read and reset the peak memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_rss() -> int:
    """Return the peak resident memory of this process in bytes, since its start or the last :func:`forget_peak`."""
    if _STATUS.exists():  # getrusage would also count the peak of the process that started this one
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> bool:
    """Reset the peak of :func:`peak_rss`; False if the system cannot, which only Linux can (proc(5))."""
    try:
        _CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True
