"""Format measured figures: a median with its range, an estimate with its standard error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MILLI = 1e-3
"""The unit ms for :func:`with_range`, for figures in seconds."""


def with_range(figures: Mapping[str, float], form: str, unit: float = 1.0) -> str:
    """Return ``median (min to max)`` of the figures of :func:`.statistics.summarise`, in multiples of ``unit``."""
    middle, low, high = (f"{figures[name] / unit:{form}}" for name in ("median", "min", "max"))
    return f"{middle} ({low} to {high})"


def with_error(figures: Mapping[str, Any], sign: str = "") -> str:
    """Return ``value ± standard_error`` with four and two digits; a single window has no error (None)."""
    error = figures["standard_error"]
    return f"{figures['value']:{sign}.4g}" + ("" if error is None else f" ± {error:.2g}")
