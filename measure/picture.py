"""Draw a benchmark: TPOT and TTFT of every variant at every point, with their spread and the bandwidth floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neuronmm.measure.benchmark_result import BenchmarkResult
from neuronmm.measure.statistics import Spread
from neuronmm.models.source import short_name

_COLOURS = {"dense": "#8c96a3", "naive": "#e6a157", "fused": "#2f7fb8", "int8": "#5f9e6e", "int4": "#a05fb0"}


def draw_benchmark(result: BenchmarkResult, path: Path) -> None:
    """Write the picture of ``result`` to ``path`` (PNG)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 0.92))  # leaves room for the subtitle
    figure = Figure(figsize=(max(9.0, 3.0 + 2.4 * len(result.points)), 5.2), layout=layout)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    bars(left, result, "tpot", "TPOT: time per later token")
    bars(right, result, "ttft", "TTFT: time to the first token")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"{short_name(result.model)} on {result.machine.device}", fontsize=13, fontweight="bold")
    figure.text(
        0.5,
        0.93,
        f"measured: median of {result.runs} alternating runs, whiskers min to max; {result.dtype}, "
        f"torch threads: {result.threads}; numbers on the left: decode tokens/s",
        ha="center",
        va="top",
        fontsize=9,
        color="#555555",
    )
    figure.savefig(path, format="png", dpi=150)


def bars(axes: Any, result: BenchmarkResult, measure: str, title: str) -> None:
    """Draw ``measure``, ``ttft`` or ``tpot``: a group of bars per point, one bar per variant."""
    points, names = result.points, list(result.variants)
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        figures = [point.variants[name] for point in points]
        spreads: list[Spread] = [getattr(entry, measure) for entry in figures]
        centres = [group + (index - (len(names) - 1) / 2) * width for group in range(len(points))]
        heights = [spread.median * 1e3 for spread in spreads]
        below = [(spread.median - spread.min) * 1e3 for spread in spreads]
        above = [(spread.max - spread.median) * 1e3 for spread in spreads]
        style: dict[str, Any] = {"label": name, "color": _COLOURS[name], "ecolor": "#333333"}
        axes.bar(centres, heights, width * 0.92, yerr=[below, above], capsize=3, **style)
        for x, height, whisker, entry in zip(centres, heights, above, figures, strict=True):
            text = f"{entry.decode_tokens_per_second:.0f}" if measure == "tpot" else f"{height:.0f}"
            axes.annotate(text, (x, height + whisker), (0, 3), textcoords="offset points", ha="center", fontsize=8)
        if measure == "tpot":
            floors = [point.batch / point.variants[name].limit_tokens_per_second * 1e3 for point in points]
            label = "floor by memory bandwidth" if index == 0 else None
            left, right = ([x + side * width / 2.2 for x in centres] for side in (-1, 1))
            axes.hlines(floors, left, right, colors="#b03a2e", linewidth=1.8, label=label)
    axes.set_xticks(range(len(points)), [f"batch {point.batch}\nprompt {point.prompt_length}" for point in points])
    axes.set_ylabel("milliseconds")
    axes.set_title(title, fontsize=11)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
