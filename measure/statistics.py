"""Summarise measured values as a spread or as an estimate with its standard error, and format both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

MILLI = 1e-3
"""The unit ms for :func:`with_range`, for values in seconds."""


@dataclass
class Spread:
    """Median, minimum and maximum of repeated measurements."""

    median: float
    min: float
    max: float


@dataclass
class Estimate:
    """A mean, and its standard error; a single value has none."""

    value: float
    standard_error: float | None


def summarise(values: Sequence[float]) -> Spread:
    """Return median, minimum and maximum of ``values``."""
    return Spread(median(values), min(values), max(values))


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of ``values`` and its standard error, the sample deviation over the root of the count."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count))


def with_range(spread: Spread, form: str, unit: float = 1.0) -> str:
    """Return ``median (min to max)`` in multiples of ``unit``."""
    middle, low, high = (f"{value / unit:{form}}" for value in (spread.median, spread.min, spread.max))
    return f"{middle} ({low} to {high})"


def with_error(figures: Estimate | Mapping[str, Any], sign: str = "") -> str:
    """Return ``value ± standard_error`` with four and two digits, or the value alone if it has no error.

    Args:
        figures: an estimate, or its JSON object.
        sign: the sign option of a format specification: ``+`` also marks positive values.
    """
    figures = figures if isinstance(figures, Estimate) else Estimate(figures["value"], figures["standard_error"])
    error = "" if figures.standard_error is None else f" ± {figures.standard_error:.2g}"
    return f"{figures.value:{sign}.4g}{error}"
