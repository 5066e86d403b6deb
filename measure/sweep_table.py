"""A sweep as people read it: one table a precision, on the terminal and as Markdown."""

from __future__ import annotations

from typing import Any

from neuronmm.measure.figures import with_error, with_range

MARK = "*"

SPEED_COLUMNS = ["tokens/s", "x dense"]
"""What :func:`speed_cells` fills."""


def tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, rows) for each precision and choice of targets; the dense model leads those of its precision.

    Points are only ever listed beside others of as many bits a weight.
    """
    columns = ["method", "asked", "removed", "MB", *(f"perplexity, {text}" for text in result["texts"])]
    columns += ["accuracy"] if result["tasks"] else []
    columns += SPEED_COLUMNS if "speed" in result["costs"] else []
    columns += ["minutes", "GiB"]
    found = []
    kinds = {(-point["bits"], point["targets"]) for point in result["points"] if point["name"] != "dense"}
    for bits, targets in sorted(kinds):
        own = [
            point for point in result["points"] if point["bits"] == -bits and point.get("targets", targets) == targets
        ]
        found.append((f"{-bits} bits a weight, {targets}", columns, [_row(result, point) for point in own]))
    return found


def notes(result: dict[str, Any]) -> list[str]:
    """What has to be known to read the tables."""
    lines = [
        f"{MARK}: no point of the same precision has fewer bytes and a lower perplexity on that text",
        "removed: share of the targeted weights; MB: all weights, 10^6 bytes; perplexity ± one standard error; minutes "
        "and GiB: time and peak memory of compressing",
    ]
    if result["tasks"]:
        names = ", ".join(result["tasks"])
        lines.append(f"accuracy: mean over {names}, by log-likelihood divided by the choice's length in characters")
    if "speed" in result["costs"]:
        machine = result["machine"]["device"]
        lines.append(
            f"tokens/s: decoding at batch 1 on {machine}, median (min to max) of runs; {MARK}: none is faster at a "
            "lower perplexity, on every text; x dense: against the dense model in the same run"
        )
    return lines


def as_markdown(result: dict[str, Any]) -> str:
    """The text kept as sweep.md."""
    lines = [f"# Sweep of {result['model']}", "", "Measured.", ""]
    for title, columns, rows in tables(result):
        lines += [f"## {title}", "", f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
        lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    lines += [f"- {note.replace(MARK, chr(92) + MARK)}" for note in notes(result)]
    return "\n".join(lines) + "\n"


def speed_cells(speed: dict[str, float] | None) -> list[str]:
    """Tokens/s, median (min to max), and how many times the dense model's; empty where it was not measured."""
    if speed is None:
        return ["", ""]
    figures = {"median": speed["tokens_per_second"], "min": speed["slowest"], "max": speed["fastest"]}
    return [with_range(figures, ".1f"), f"{speed['speed_up']:.2f}"]


def _row(result: dict[str, Any], point: dict[str, Any]) -> list[str]:
    dense = point["name"] == "dense"
    cells = [point["name"], "" if dense else f"{point['ratio']:.2f}", "" if dense else f"{point['realised_ratio']:.2%}"]
    cells.append(f"{point['bytes'] / 1e6:.1f}")
    for text in result["texts"]:
        mark = f" {MARK}" if f"bytes, {text}" in point["fronts"] else ""
        cells.append(with_error(point["perplexity"][text]) + mark if text in point["perplexity"] else "")
    if result["tasks"]:
        accuracy = point.get("accuracy")
        cells.append(f"{accuracy['value']:.1%} ± {accuracy['standard_error']:.1%}" if accuracy else "")
    if "speed" in result["costs"]:
        rate, gain = speed_cells(point.get("speed"))
        mark = f" {MARK}" if all(f"speed, {text}" in point["fronts"] for text in result["texts"]) else ""
        cells += [rate + mark, gain]
    if dense:
        return [*cells, "", ""]
    return [*cells, f"{point['seconds'] / 60:.1f}", f"{point['peak_rss_bytes'] / 2**30:.2f}"]
