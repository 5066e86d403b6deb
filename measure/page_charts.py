"""The charts of the report page: matplotlib figures as SVG elements that fit a light and a dark page.

An element has no address, no style of its own for text, and takes the colour of the text around it for everything that
matplotlib draws in black or dark grey. Text stays text, so it can be searched and read aloud.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from neuronmm.measure.benchmark_result import BenchmarkResult
from neuronmm.measure.pareto import panel
from neuronmm.measure.picture import bars
from neuronmm.measure.prediction import PredictionResult
from neuronmm.measure.sweep_points import SweepPoint
from neuronmm.models.families import LINEARS

WIDTH = 5.2  # inches; a phone shows 360 pixels at three quarters of the size
_INK = ("#000000", "#333333", "#555555")  # drawn in the colour of the text
_PAPER = "#ffffff"
_LINES = ("#2f7fb8", "#c8553d", "#4f9d69", "#8e5ea2", "#b8862b", "#3f9c9b", "#c2578f")
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "neuronmm", "text.parse_math": False, "font.size": 9.0}

Cells = Mapping[tuple[int, str], float]
"""(layer, short name of a linear) -> a figure."""

Spectrum = tuple[Sequence[float], float, float]
"""The relative losses at equal steps of the rank, without those at rank 0 and at the full rank; the chosen rank as a
fraction of the full one, 0 to 1; and the relative loss there."""


@matplotlib.rc_context(_STYLE)
def ratio_map(removed: Cells, layers: int) -> str:
    """Draw the fraction of parameters removed from every linear; a linear without a figure is dense."""
    names = list(LINEARS)
    grid = [[removed.get((layer, name), math.nan) for name in names] for layer in range(layers)]
    figure, axes = _figure(1.1 + 0.2 * layers)
    mesh = axes.pcolormesh(grid, cmap="viridis", vmin=0, vmax=max([0.6, *removed.values()]), edgecolors="none")
    for layer, row in enumerate(grid):
        for column, value in enumerate(row):
            dense = math.isnan(value)
            colour = "#000000" if dense else "#101010" if mesh.norm(value) > 0.6 else "#f4f4f4"
            text = "dense" if dense else f"{value:.0%}"
            axes.text(column + 0.5, layer + 0.5, text, ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks([column + 0.5 for column in range(len(names))], names)
    step = max(1, layers // 16)
    axes.set_yticks([layer + 0.5 for layer in range(0, layers, step)], [str(n) for n in range(0, layers, step)])
    axes.set_ylabel("layer")
    axes.invert_yaxis()
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return _svg(figure, "ratio", "fraction of the parameters removed from each linear of each layer")


@matplotlib.rc_context(_STYLE)
def loss_lines(losses: Cells, label: str) -> str:
    """Draw the loss of every kind of linear over the depth of the model."""
    figure, axes = _figure(3.2)
    for name, colour in zip(LINEARS, _LINES, strict=True):
        points = sorted((layer, loss) for (layer, linear), loss in losses.items() if linear == name)
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", markersize=4, linewidth=1.2, color=colour, label=name)
    axes.set_xlabel("layer")
    axes.set_ylabel(label)
    _finish(figure, axes)
    return _svg(figure, "loss", f"{label} of each linear by layer")


@matplotlib.rc_context(_STYLE)
def spectra_panels(spectra: Mapping[tuple[int, str], Spectrum], layers: int) -> str:
    """Draw, by kind of linear, the loss that every rank would leave in each layer, with a dot at the chosen rank."""
    kinds = [name for name in LINEARS if any(linear == name for _, linear in spectra)]
    rows = (len(kinds) + 1) // 2
    figure = _canvas(0.7 + 1.6 * rows)
    panels = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).flatten()
    shades = matplotlib.colormaps["viridis"].resampled(layers)
    for axes, kind in zip(panels, kinds, strict=False):
        for (layer, linear), (errors, rank, error) in spectra.items():
            if linear == kind:
                steps = len(errors) + 1
                x = [step / steps for step in range(steps)]
                axes.plot(x, [1.0, *errors], color=shades(layer), linewidth=0.9)
                axes.plot(rank, error, marker=".", markersize=4, color=shades(layer))
        axes.set_title(kind, fontsize=9)
        axes.patch.set_alpha(0)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    for axes in panels[len(kinds) :]:
        axes.remove()
    figure.supxlabel("rank, as a fraction of the full rank", fontsize=9)
    figure.supylabel("relative loss", fontsize=9)
    return _svg(figure, "spectra", "relative loss of each linear by rank, with the chosen rank")


@matplotlib.rc_context(_STYLE)
def benchmark_bars(result: BenchmarkResult) -> list[str]:
    """Draw TPOT and TTFT of every variant at every point, with the floor that memory bandwidth sets."""
    charts = []
    for measure, title in (("tpot", "TPOT: time per later token"), ("ttft", "TTFT: time to the first token")):
        figure, axes = _figure(3.4)
        bars(axes, result, measure, title)
        _finish(figure, axes, legend_of=axes)
        charts.append(_svg(figure, measure, f"{title}, by variant"))
    return charts


@matplotlib.rc_context(_STYLE)
def sweep_panels(points: Sequence[SweepPoint], costs: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Draw the perplexity on every text against every cost, with the Pareto front."""
    charts = []
    for number, (text, cost) in enumerate(itertools.product(texts, costs)):
        figure, axes = _figure(4.2)
        panel(axes, list(points), text, cost)
        _finish(figure, axes, legend_of=axes, columns=1)
        charts.append(_svg(figure, f"sweep{number}", f"perplexity on {text} against {cost}"))
    return charts


@matplotlib.rc_context(_STYLE)
def prediction_timeline(results: Sequence[PredictionResult], new_tokens: int) -> str:
    """Draw the predicted time of an answer, first token and later ones, dense and compressed on every device."""
    figure, axes = _figure(0.9 + 0.5 * len(results))
    labels: list[str] = []
    for result in results:
        for name, model in (("dense", result.dense), ("compressed", result.compressed)):
            row, times = len(labels), model.times
            later = new_tokens * times.tpot * 1e3
            first, colour = times.ttft * 1e3, _LINES[1] if name == "dense" else _LINES[0]
            axes.barh(row, first, color=colour, alpha=0.45)
            axes.barh(row, later, left=first, color=colour)
            axes.annotate(f"{first + later:.0f}", (first + later, row), (3, 0), textcoords="offset points", va="center")
            labels.append(f"{result.config.device} {name}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("predicted ms")
    _finish(figure, axes)
    return _svg(figure, "timeline", "predicted time of an answer on Trainium")


def _canvas(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine())
    figure.patch.set_alpha(0)
    return figure


def _figure(height: float) -> tuple[Figure, Any]:
    figure = _canvas(height)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    return figure, axes


def _finish(figure: Figure, axes: Any, legend_of: Any = None, columns: int = 4) -> None:
    """Remove the frame, add a grid and, if there are labels, a legend below."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _svg(figure: Figure, prefix: str, description: str) -> str:
    """Return the figure as an SVG element. ``prefix`` makes its ids differ from those of other charts of the page."""
    target = io.BytesIO()
    figure.savefig(target, format="svg")
    root = ElementTree.fromstring(target.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "title"):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        for name, value in list(element.attrib.items()):
            del element.attrib[name]
            element.set(_local(name), _inside(value, _local(name), prefix))
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.attrib |= {"role": "img", "aria-label": description, "fill": "currentColor"}
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    """Return a name without its XML namespace, as HTML writes it."""
    return name.rpartition("}")[2]


def _inside(value: str, attribute: str, prefix: str) -> str:
    """Return the value of an attribute with the page's colours, and with ids and references that are its own."""
    if attribute == "id":
        return f"{prefix}-{value}"
    if attribute == "href":
        return value.replace("#", f"#{prefix}-", 1)
    value = re.sub(r"url\(#", f"url(#{prefix}-", value)
    for ink in _INK:
        value = value.replace(ink, "currentColor")
    return value.replace(_PAPER, "var(--paper)")
