"""Draw the pictures of docs/concepts.md: a linear's factors to scale, spectra, and the bytes that a token reads.

    python scripts/concept_pictures.py MODEL

MODEL is the dense SmolLM2: the folder, or the GGUF file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from neuronmm.compression.factorize import factorize
from neuronmm.compression.ranks import Linear
from neuronmm.compression.reader import Reader
from neuronmm.measure.inspection import inspect
from neuronmm.models.contents import inspect as contents_of
from neuronmm.models.families import LAYERS, LINEARS
from neuronmm.models.source import resolve

FOLDER = Path(__file__).parent.parent / "docs" / "concepts"
COLOURS = ("#2f7fb8", "#c8553d", "#4f9d69", "#8e5ea2", "#b8862b", "#3f9c9b", "#c2578f")
OUTPUTS, INPUTS, KEPT = 1536, 576, 0.8  # SmolLM2's gate, and the fraction of the weights that is kept


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


def spectra(folder: Path) -> Figure:
    """Draw the spectrum of every linear of the middle layer: the loss of the plain SVD at each rank."""
    contents = contents_of(folder)
    reader, layer = Reader(folder, contents.files), contents.config.num_hidden_layers // 2
    figure, axes = _axes(6.4, 3.4)
    for (short, path), colour in zip(LINEARS.items(), COLOURS, strict=True):
        errors = factorize(reader[f"{LAYERS}.{layer}.{path}.weight"], 1).spectrum
        steps = len(errors) + 1
        axes.plot([step / steps for step in range(steps + 1)], [1.0, *errors, 0.0], color=colour, label=short)
    axes.set_xlabel("rank, as a fraction of the full rank")
    axes.set_ylabel("relative error of the weight")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, ncols=2)
    return figure


def step_bytes(counts: dict[str, int]) -> Figure:
    """Draw the weights that the decoding of one token reads, by kind, in bf16; ``counts`` are the dense model's."""
    figure, axes = _axes(6.4, 2.0)
    head = counts["head"] or counts["embedding"]  # tied: the embedding is the head
    dense = {"attention": counts["attention"], "MLP": counts["MLP"], "head": head}
    for row, kinds in enumerate((dense, dense | {"MLP": KEPT * dense["MLP"]})):
        left = 0.0
        for (kind, count), colour in zip(kinds.items(), COLOURS, strict=False):
            size = 2 * count / 1e6
            axes.barh(row, size, left=left, color=colour, alpha=0.75, label=kind if row == 0 else None)
            axes.text(left + size / 2, row, f"{size:.0f}", ha="center", va="center", fontsize=9)
            left += size
    axes.set_yticks([0, 1], ["dense", "compressed"])
    axes.invert_yaxis()
    axes.set_xlabel("MB that one token reads, bf16")
    figure.legend(frameon=False, ncols=3, loc="outside upper center")
    return figure


def _axes(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def main() -> None:
    """Write the three pictures into docs/concepts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="the dense model: a folder or a GGUF file")
    folder = resolve(parser.parse_args().model)
    pictures = {"factors": factors(), "spectra": spectra(folder), "bytes": step_bytes(inspect(folder).parameters)}
    FOLDER.mkdir(exist_ok=True)
    for name, figure in pictures.items():
        with matplotlib.rc_context({"svg.hashsalt": "neuronmm"}):
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
