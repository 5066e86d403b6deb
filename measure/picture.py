"""The benchmark as a picture: TPOT and TTFT by point and variant, with spread and bandwidth floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COLOURS = {"dense": "#8c96a3", "naive": "#e6a157", "fused": "#2f7fb8"}


def draw_benchmark(result: dict[str, Any], path: Path) -> None:
    """Write the picture of a benchmark's result to ``path`` (PNG)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    points = result["points"]
    layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 0.92))  # the rest is the subtitle's
    figure = Figure(figsize=(max(9.0, 3.0 + 2.4 * len(points)), 5.2), layout=layout)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _bars(left, result, "tpot", "TPOT: time per later token")
    _bars(right, result, "ttft", "TTFT: time to the first token")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    machine = result["machine"]
    figure.suptitle(f"{Path(result['model']).name} on {machine['device']}", fontsize=13, fontweight="bold")
    figure.text(
        0.5,
        0.93,
        f"measured: median of {result['runs']} alternating runs, whiskers min to max; {result['dtype']}, "
        f"torch threads: {result['threads']}; numbers on the left: decode tokens/s",
        ha="center",
        va="top",
        fontsize=9,
        color="#555555",
    )
    figure.savefig(path, format="png", dpi=150)


def _bars(axes: Any, result: dict[str, Any], measure: str, title: str) -> None:
    points, names = result["points"], list(result["variants"])
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        figures = [point["variants"][name] for point in points]
        at = [group + (index - (len(names) - 1) / 2) * width for group in range(len(points))]
        middle = [f[measure]["median"] * 1e3 for f in figures]
        below = [m - f[measure]["min"] * 1e3 for m, f in zip(middle, figures, strict=True)]
        above = [f[measure]["max"] * 1e3 - m for m, f in zip(middle, figures, strict=True)]
        axes.bar(
            at, middle, width * 0.92, yerr=[below, above], capsize=3, label=name, color=_COLOURS[name], ecolor="#333333"
        )
        for x, height, up, f in zip(at, middle, above, figures, strict=True):
            text = f"{f['decode_tokens_per_second']:.0f}" if measure == "tpot" else f"{height:.0f}"
            axes.annotate(text, (x, height + up), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    if measure == "tpot":
        # The floor by bandwidth, one tick a bar.
        for index, name in enumerate(names):
            for group, point in enumerate(points):
                x = group + (index - (len(names) - 1) / 2) * width
                floor = point["batch"] / point["variants"][name]["limit_tokens_per_second"] * 1e3
                label = "floor by memory bandwidth" if index == group == 0 else None
                axes.hlines(floor, x - width / 2.2, x + width / 2.2, colors="#b03a2e", linewidth=1.8, label=label)
    axes.set_xticks(range(len(points)), [f"batch {p['batch']}\nprompt {p['prompt_length']}" for p in points])
    axes.set_ylabel("milliseconds")
    axes.set_title(title, fontsize=11)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
