"""Write the tables and the picture of docs/results/quality.md from docs/results/quality.json and new sweeps.

python scripts/quality_report.py docs/results SWEEP...

The points of the sweeps (folders of ``neuronmm sweep``) are added to quality.json. A point replaces an older one of the
same method, ratio and targets. If both have the same perplexities they are the same model, and the older point's other
measurements stay.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from neuronmm.measure.pareto import draw_sweep, mark_fronts, method_of
from neuronmm.measure.statistics import with_error
from neuronmm.measure.sweep_points import read_points
from neuronmm.measure.sweep_table import SPEED_COLUMNS, speed_cells
from neuronmm.models.documents import write_json

Point = dict[str, Any]

PICTURED = (
    "dense",
    "int8",
    "int4",
    "llama.cpp Q8_0",
    "llama.cpp Q4_1",
    "llama.cpp Q4_0",
    "SVD-LLM",
    "whitened+share+global+int4",
    "whitened+share+global+pivoted",
    "fisher+share+global+pivoted",
    "fisher+share+global+pivoted+fast",
    "fisher+share+global+pivoted+int8",
    "fisher+share+global+int4",
)
"""The methods in the picture; with all of them it would be unreadable."""

PEER, DESTROYED = "SVD-LLM", ("svd", "asvd")
"""The method whose excess over the dense model divides the others', and the methods that the shares leave out."""

TITLES = {"mlp": "MLP", "all": "MLP and attention"}

BEGIN, END = "<!-- Written by scripts/quality_report.py -->", "<!-- End of what it wrote -->"


def merge(points: Iterable[Point], sweeps: Iterable[Path]) -> list[Point]:
    """Merge the points and the sweeps' points; sort them by ratio, then from the worst to the best."""
    merged: dict[tuple[Any, ...], Point] = {}
    for point in [*points, *(new for sweep in sweeps for new in read_points(sweep))]:
        key = point["name"], point["ratio"], point.get("targets")
        before = merged.get(key, point)
        merged[key] = {**before, **point} if before["perplexity"] == point["perplexity"] else point
    return sorted(merged.values(), key=lambda point: (point["ratio"], -_values(point)[0]))


def content(points: list[Point], texts: list[str]) -> str:
    """Return the text between the marks; ``texts`` names the columns."""
    lead = f"Excess perplexity over dense, as a share of that of {PEER}'s own code, {' / '.join(texts)}:"
    return "\n\n".join([lead, shares(points), "All measurements:", tables(points, texts)])


def tables(points: list[Point], texts: Iterable[str]) -> str:
    """Return one table per choice of targets; ``texts`` names the columns, bold marks the best of a ratio."""
    parts = []
    for targets, title in TITLES.items():
        shown = [point for point in points if point.get("targets") == targets]
        columns = [f"{title}, removed: asked", "method", "realised", "MB", *texts, "minutes", "GiB", *SPEED_COLUMNS]
        rows = [_row(point, [other for other in shown if other["ratio"] == point["ratio"]]) for point in shown]
        parts.append(_table(columns, 1, rows))
    return "\n\n".join(parts)


def shares(points: list[Point]) -> str:
    """Return one table per choice of targets: each method's excess over dense as a share of :data:`PEER`'s, %."""
    dense = next(_values(point) for point in points if point["name"] == "dense")
    parts = []
    for targets, title in TITLES.items():
        values = {
            (point["ratio"], method_of(point)): _values(point) for point in points if point.get("targets") == targets
        }
        ratios = sorted({ratio for ratio, method in values if method == PEER})
        methods = sorted(
            {method for _, method in values} - {PEER, *DESTROYED}, key=lambda name: (name.count("+"), name)
        )
        rows = [
            [method, *(_share(values.get((r, method)), values[r, PEER], dense) for r in ratios)] for method in methods
        ]
        parts.append(_table([title, *(f"{ratio:g}" for ratio in ratios)], 0, rows))
    return "\n\n".join(parts)


def _table(columns: list[str], words: int, rows: list[list[str]]) -> str:
    """Return a Markdown table; column ``words`` is left-aligned text, the others are right-aligned figures."""
    sides = ["---" if index == words else "---:" for index in range(len(columns))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, sides, *rows])


def _share(values: list[float] | None, peer: list[float], dense: list[float]) -> str:
    if values is None:
        return ""
    return " / ".join(f"{(value - d) / (other - d):.0%}" for value, other, d in zip(values, peer, dense, strict=True))


def _row(point: Point, rivals: list[Point]) -> list[str]:
    cells = [f"{point['ratio']:g}", method_of(point), f"{point['realised_ratio']:.2%}", f"{point['bytes'] / 1e6:.1f}"]
    best = [min(values) for values in zip(*map(_values, rivals), strict=True)]
    for figures, least in zip(point["perplexity"].values(), best, strict=True):
        cell = with_error(figures)
        cells.append(f"**{cell}**" if figures["value"] == least else cell)
    minutes, memory = "", ""
    if "seconds" in point:
        minutes, memory = f"{point['seconds'] / 60:.0f}", f"{point['peak_rss_bytes'] / 2**30:.2f}"
    return [*cells, minutes, memory, *speed_cells(point.get("speed"))]


def _values(point: Point) -> list[float]:
    return [figures["value"] for figures in point["perplexity"].values()]


def main(folder: Path, sweeps: list[Path]) -> None:
    """Update quality.json, quality.md and quality.png in ``folder``."""
    data, document = folder / "quality.json", folder / "quality.md"
    result = json.loads(data.read_text(encoding="utf-8"))
    result["points"] = merge(result["points"], sweeps)
    for point in result["points"]:
        if set(point["perplexity"]) != set(result["texts"]):
            raise SystemExit(f"{point['name']}: has the texts {list(point['perplexity'])}, not {list(result['texts'])}")
        point["perplexity"] = {text: point["perplexity"][text] for text in result["texts"]}
    result["costs"] = ["bytes", "speed"] if any("speed" in point for point in result["points"]) else ["bytes"]
    write_json(data, result)
    before, _, tail = document.read_text(encoding="utf-8").partition(BEGIN)
    after = tail.partition(END)[2]
    written = content(result["points"], list(result["texts"].values()))
    document.write_text(f"{before}{BEGIN}\n\n{written}\n\n{END}{after}", encoding="utf-8")
    shown = [point for point in result["points"] if method_of(point) in PICTURED]
    costs = [cost for cost in result["costs"] if cost == "bytes" or any(cost in point for point in shown)]
    mark_fronts(shown, costs, list(result["texts"]))
    draw_sweep(shown, costs, list(result["texts"]), Path(result["model"]).name, folder / "quality.png")


if __name__ == "__main__":
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of quality.json, quality.md and quality.png")
    parser.add_argument("sweeps", type=Path, nargs="*", metavar="SWEEP", help="a folder of neuronmm sweep")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.sweeps)
