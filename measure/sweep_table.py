"""Format a sweep for people: one table per choice of targets, for the terminal and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neuronmm.measure.statistics import Spread, with_error, with_range
from neuronmm.measure.sweep_points import SweepPoint

if TYPE_CHECKING:
    from neuronmm.measure.sweep import SweepResult

MARK = "*"

SPEED_COLUMNS = ["tokens/s", "x dense"]
"""The columns of :func:`speed_cells`."""


def tables(result: SweepResult) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return (title, columns, rows) for each choice of targets.

    The dense model and what is only rounded belong to every choice.
    """
    columns = ["method", "bits", "asked", "removed", "MB", *(f"perplexity, {text}" for text in result.settings.texts)]
    columns += ["accuracy"] if result.settings.tasks else []
    columns += SPEED_COLUMNS if "speed" in result.costs else []
    columns += ["minutes", "GiB"]
    parts = []
    for targets in sorted({point["targets"] for point in result.points if "targets" in point}) or [""]:
        rows = [_row(result, point) for point in result.points if point.get("targets", targets) == targets]
        parts.append((f"targets: {targets or 'none'}", columns, rows))
    return parts


def notes(result: SweepResult) -> list[str]:
    """Return the notes that explain the columns and the mark."""
    lines = [
        f"{MARK}: no point has fewer bytes and a lower perplexity on that text",
        "bits: of the smallest weights; removed: fraction of the targeted weights; MB: all weights, 10^6 bytes; "
        "perplexity ± one standard error; minutes and GiB: time and peak memory of compressing",
    ]
    if result.settings.tasks:
        names = ", ".join(result.settings.tasks)
        lines.append(f"accuracy: mean over {names}, by log-likelihood divided by the choice's length in characters")
    if "speed" in result.costs:
        machine = result.machine.device
        lines.append(
            f"tokens/s: decoding at batch 1 on {machine}, median (min to max) of runs; {MARK}: none is faster at a "
            "lower perplexity, on every text; x dense: against the dense model in the same run"
        )
    return lines


def as_markdown(result: SweepResult) -> str:
    """Return the content of sweep.md."""
    lines = [f"# Sweep of {result.model}", "", "Measured.", ""]
    for title, columns, rows in tables(result):
        lines += [f"## {title}", "", f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
        lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    lines += [f"- {note.replace(MARK, chr(92) + MARK)}" for note in notes(result)]
    return "\n".join(lines) + "\n"


def speed_cells(speed: dict[str, float] | None) -> list[str]:
    """Return tokens/s, median (min to max), and its ratio to the dense model's; empty cells if not measured."""
    if speed is None:
        return ["", ""]
    spread = Spread(speed["tokens_per_second"], speed["slowest"], speed["fastest"])
    return [with_range(spread, ".1f"), f"{speed['speed_up']:.2f}"]


def _percent(accuracy: dict[str, Any]) -> str:
    """Return ``value ± standard error`` in percent; the accuracy in a single question has no error."""
    error = accuracy["standard_error"]
    return f"{accuracy['value']:.1%}" + ("" if error is None else f" ± {error:.1%}")


def _row(result: SweepResult, point: SweepPoint) -> list[str]:
    cells = [point["name"], str(point["bits"])]
    cells += [f"{point['ratio']:g}", f"{point['realised_ratio']:.2%}"] if "targets" in point else ["", ""]
    cells.append(f"{point['bytes'] / 1e6:.1f}")
    for text in result.settings.texts:
        mark = f" {MARK}" if f"bytes, {text}" in point["fronts"] else ""
        cells.append(with_error(point["perplexity"][text]) + mark if text in point["perplexity"] else "")
    if result.settings.tasks:
        accuracy = point.get("accuracy")
        cells.append(_percent(accuracy) if accuracy else "")
    if "speed" in result.costs:
        rate, gain = speed_cells(point.get("speed"))
        mark = f" {MARK}" if all(f"speed, {text}" in point["fronts"] for text in result.settings.texts) else ""
        cells += [rate + mark, gain]
    if "seconds" not in point:  # the dense model, or made elsewhere
        return [*cells, "", ""]
    return [*cells, f"{point['seconds'] / 60:.1f}", f"{point['peak_rss_bytes'] / 2**30:.2f}"]
