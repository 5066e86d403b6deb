"""Draw the pictures of docs/concepts.md: a linear's factors to scale, spectra, and the bytes that a token reads.

    python scripts/concept_pictures.py MODEL OUT

MODEL is the dense model, OUT its compressed checkpoint with the report.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from neuronmm.compression import report
from neuronmm.compression.ranks import Linear
from neuronmm.measure.inspection import Inspection, inspect
from neuronmm.models.families import LAYERS, LINEARS

FOLDER = Path(__file__).parent.parent / "docs" / "concepts"
COLOURS = ("#2f7fb8", "#c8553d", "#4f9d69", "#8e5ea2", "#b8862b", "#3f9c9b", "#c2578f")
OUTPUTS, INPUTS, KEPT = 1536, 576, 0.8  # SmolLM2's gate, and the fraction of its weights that both forms keep


def factors() -> Figure:
    """Draw one weight dense, as two factors and in the pivoted row form, all to scale."""
    two, pivoted = (
        int(Linear("gate", OUTPUTS, INPUTS, pivoted=form).rank_with(KEPT * OUTPUTS * INPUTS)) for form in (False, True)
    )
    figure, axes = _axes(7.2, 3.4)
    # (left, top, width, height, colour, name)
    parts: list[tuple[float, float, float, float, str, str]] = [
        (0, 0, INPUTS, OUTPUTS, COLOURS[1], f"W\n{OUTPUTS} x {INPUTS}"),
        (900, 0, two, OUTPUTS, COLOURS[0], f"B\n{OUTPUTS} x {two}"),
        (950 + two, 0, INPUTS, two, COLOURS[4], f"A\n{two} x {INPUTS}"),
        (2200, 0, pivoted, OUTPUTS - pivoted, COLOURS[2], f"C\n{OUTPUTS - pivoted} x {pivoted}"),
        (2250 + pivoted, 0, INPUTS, pivoted, COLOURS[4], f"P: rows of W\n{pivoted} x {INPUTS}"),
    ]
    for left, top, width, height, colour, name in parts:
        axes.add_patch(Rectangle((left, top), width, height, facecolor=colour, alpha=0.55, edgecolor="#333333"))
        axes.text(left + width / 2, top + height / 2, name, ha="center", va="center", fontsize=8)
    captions = (
        (0, f"dense\n{OUTPUTS * INPUTS:,} weights"),
        (900, f"two factors, rank {two}\n{two * (OUTPUTS + INPUTS):,} weights"),
        (2200, f"pivoted, rank {pivoted}\n{pivoted * (OUTPUTS + INPUTS - pivoted):,} weights"),
    )
    for left, caption in captions:
        axes.text(left, OUTPUTS + 60, caption, va="top", fontsize=9)
    axes.set_xlim(-30, 3350)
    axes.set_ylim(OUTPUTS + 380, -30)
    axes.set_aspect("equal")
    axes.axis("off")
    return figure


def spectra(document: dict[str, Any]) -> Figure:
    """Draw the spectrum of every kind of linear in the middle layer, with the chosen rank."""
    shorts = {path: short for short, path in LINEARS.items()}
    every = document["matrices"]
    middle = every[len(every) // 2]["name"].split(".")[2]
    prefix = f"{LAYERS}.{middle}."
    matrices = [one for one in every if one["spectrum"] and one["name"].startswith(prefix)]
    figure, axes = _axes(6.4, 3.4)
    for matrix, colour in zip(matrices, COLOURS, strict=False):
        steps = len(matrix["spectrum"]) + 1
        names = "+".join(shorts[name.removeprefix(prefix)] for name in (matrix["name"], *matrix["sharing"]))
        x = [step / steps for step in range(steps)]
        axes.plot(x, [1.0, *matrix["spectrum"]], color=colour, label=names)
        axes.plot(matrix["rank"] / min(matrix["shape"]), matrix["relative_error"], "o", color=colour, markersize=5)
    axes.set_xlabel("rank, as a fraction of the full rank")
    axes.set_ylabel("relative loss")
    axes.set_title(f"layer {middle}: what each rank would lose; dots: the chosen ranks", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def step_bytes(dense: Inspection, low: Inspection) -> Figure:
    """Draw the weights that the decoding of one token reads, by kind, in bf16."""
    figure, axes = _axes(6.4, 2.0)
    for row, model in enumerate((dense, low)):
        left = 0.0
        counts = dict(model.parameters)
        counts["head"] = counts["head"] or counts["embedding"]  # tied: the embedding is the head
        for kind, colour in zip(("attention", "MLP", "head"), COLOURS, strict=False):
            size = 2 * counts[kind] / 1e6
            axes.barh(row, size, left=left, color=colour, alpha=0.75, label=kind if row == 0 else None)
            axes.text(left + size / 2, row, f"{size:.0f}", ha="center", va="center", fontsize=9)
            left += size
    axes.set_yticks([0, 1], ["dense", "compressed"])
    axes.invert_yaxis()
    axes.set_xlabel("MB that one token reads, bf16")
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def _axes(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def main() -> None:
    """Write the three pictures into docs/concepts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="the dense model: a folder or a GGUF file")
    parser.add_argument("out", type=Path, metavar="OUT", help="its compressed checkpoint")
    args = parser.parse_args()
    pictures = {
        "factors": factors(),
        "spectra": spectra(report.read(args.out)),
        "bytes": step_bytes(inspect(args.model), inspect(args.out)),
    }
    FOLDER.mkdir(exist_ok=True)
    for name, figure in pictures.items():
        with matplotlib.rc_context({"svg.hashsalt": "neuronmm"}):
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
