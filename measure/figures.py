"""Measured figures as people read them: a median with its range, an estimate with its standard error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MILLI = 1e-3
"""A unit of :func:`with_range`: seconds in ms."""


def with_range(figures: Mapping[str, float], form: str, unit: float = 1.0) -> str:
    """``median (min to max)`` of what :func:`.statistics.summarise` gives, in multiples of ``unit``."""
    middle, low, high = (f"{figures[name] / unit:{form}}" for name in ("median", "min", "max"))
    return f"{middle} ({low} to {high})"


def with_error(figures: Mapping[str, Any], sign: str = "") -> str:
    """``value ± standard_error``, four and two digits; the error may be None (a single window has none)."""
    error = figures["standard_error"]
    return f"{figures['value']:{sign}.4g}" + ("" if error is None else f" ± {error:.2g}")
