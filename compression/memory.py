"""How much memory a run took."""

from __future__ import annotations

import resource
import sys


def peak_rss() -> int:
    """The largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
