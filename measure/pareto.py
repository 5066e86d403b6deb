"""The Pareto fronts of a sweep, and its picture: perplexity against size and against speed."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuronmm.measure.sweep_points import SweepPoint

_COLOURS = ("#2f7fb8", "#c8553d", "#4f9d69", "#8e5ea2", "#d9a441", "#4aa3a2", "#7a5c43", "#c2578f")
_MARKERS = {"mlp": "o", "all": "s", "attention": "D"}  # by a point's targets
_TOP = 10  # upper end of the perplexity axis, in multiples of the dense model's
_LEGEND, _HANDLE = 110, 8  # widths in characters: a line of the legend below one panel, a label's handle
_AXES = {"bytes": "weights, MB", "speed": "decode tokens/s, batch 1"}


def cost_of(point: SweepPoint, cost: str) -> float:
    """Return a point's ``bytes``, or for ``speed`` its negated tokens/s: smaller is better in both."""
    return point["bytes"] if cost == "bytes" else -point["speed"]["tokens_per_second"]


def is_measured(point: SweepPoint, cost: str, text: str) -> bool:
    """Return whether a point has both measures; a point created elsewhere may lack one."""
    return cost in point and text in point["perplexity"]


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the Pareto front of the points [(x, y)], where smaller is better in both coordinates.

    Another point beats a point if it is no worse in both coordinates and better in one; equal points do not.
    """
    return [
        index
        for index, (x, y) in enumerate(points)
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    ]


def mark_fronts(points: list[SweepPoint], costs: list[str], texts: list[str]) -> None:
    """Set each point's ``fronts``, the fronts it is on."""
    for point in points:
        point["fronts"] = []
    for cost in costs:
        for text in texts:
            measured = [point for point in points if is_measured(point, cost, text)]
            pairs = [(cost_of(point, cost), point["perplexity"][text]["value"]) for point in measured]
            for index in front(pairs):
                measured[index]["fronts"].append(f"{cost}, {text}")


def draw_sweep(points: list[SweepPoint], costs: list[str], texts: list[str], title: str, path: Path) -> None:
    """Write the picture of a sweep's points to ``path`` (PNG): one row per text, one column per measure of cost."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    caption = (
        f"measured; bars: one standard error; numbers: share removed; line: Pareto front; "
        f"triangles: perplexity above {_TOP} times the dense model's"
    )
    lines = textwrap.wrap(caption, 90 * len(costs))
    height = 4.6 * len(texts) + 1.0
    room = 0.15 + 0.2 * len(lines)  # for the subtitle
    layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - room / height))
    figure = Figure(figsize=(6.5 * len(costs) + 1, height), layout=layout)
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(texts), len(costs), squeeze=False)
    for row, text in zip(grid, texts, strict=True):
        for axes, cost in zip(row, costs, strict=True):
            panel(axes, points, text, cost)
    handles, labels = grid[0][0].get_legend_handles_labels()
    longest = max(map(len, labels)) + _HANDLE
    columns = max(1, min(len(labels), _LEGEND * len(costs) // longest))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.text(0.5, 1 - 0.4 / height, "\n".join(lines), ha="center", va="top", fontsize=9, color="#555555")
    figure.savefig(path, format="png", dpi=150)


def panel(axes: Any, points: list[SweepPoint], text: str, cost: str) -> None:
    """Draw one text against one cost.

    Each method has a colour, each choice of targets a marker; points of few bits are hollow.
    """

    def value(point: SweepPoint) -> float:
        return point["perplexity"][text]["value"]

    dense = next(point for point in points if point["name"] == "dense")
    several = len({point.get("targets") for point in points} - {None}) > 1
    methods = dict.fromkeys(method_of(point) for point in points if point is not dense)
    colours = dict(zip(methods, itertools.cycle(_COLOURS), strict=False))
    usual, top = dense["bits"], _TOP * value(dense)
    for method, targets, bits in dict.fromkeys(map(_series, points)):
        series = [p for p in points if _series(p) == (method, targets, bits) and is_measured(p, cost, text)]
        colour = colours.get(method, "#333333")
        label = ", ".join(filter(None, (method, targets if several or not method else None)))
        label += "" if bits == usual or f"int{bits}" in method.split("+") else f" ({bits} bit)"
        filling = colour if bits == usual else "white"
        style: dict[str, Any] = {"color": colour, "markerfacecolor": filling, "zorder": 3}
        shown = [point for point in series if value(point) <= top]
        errors = [point["perplexity"][text]["standard_error"] or 0 for point in shown]
        marker = {"fmt": _MARKERS[targets], "markersize": 7} if targets else {"fmt": "*", "markersize": 11}
        xs, ys = [_x(point, cost) for point in shown], [value(point) for point in shown]
        axes.errorbar(xs, ys, yerr=errors, capsize=3, label=label, **marker, **style)
        beyond = [_x(point, cost) for point in series if value(point) > top]
        axes.plot(beyond, [top] * len(beyond), "^", markersize=7, **style)
        for point in series if targets else ():
            at = (_x(point, cost), min(value(point), top))
            axes.annotate(f"{point['ratio']:g}", at, (5, 5), textcoords="offset points", fontsize=8)
    best = [point for point in points if f"{cost}, {text}" in point["fronts"]]
    line = sorted((_x(point, cost), value(point)) for point in best if value(point) <= top)
    axes.plot([x for x, _ in line], [y for _, y in line], "-", color="#999999", linewidth=1.2, zorder=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel(_AXES[cost])
    axes.set_ylabel(f"perplexity, {text}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def _series(point: SweepPoint) -> tuple[str, str | None, int]:
    """Return what identifies a line of the legend: method, targets (None without factors) and bits per weight."""
    return method_of(point), point.get("targets"), point["bits"]


def method_of(point: SweepPoint) -> str:
    """Return a point's name without the words for its targets."""
    return "+".join(word for word in point["name"].split("+") if word not in _MARKERS)


def _x(point: SweepPoint, cost: str) -> float:
    return cost_of(point, cost) / 1e6 if cost == "bytes" else -cost_of(point, cost)
