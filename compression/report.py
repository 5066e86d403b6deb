"""What a compression did: one JSON document for machines, one Markdown table for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from neuronmm.models.documents import read_object, write_json
from neuronmm.models.errors import UserError


class Matrix(TypedDict):
    """One targeted linear, or several that share its A: then the sizes are of all together.

    ``rank`` is None where it stayed dense; errors are relative to the dense output's norm.
    """

    name: str
    sharing: list[str]
    shape: list[int]
    rank: int | None
    dense_parameters: int
    kept_parameters: int
    asked_ratio: float
    realised_ratio: float
    relative_error: float


REPORT = "compression_report.json"
"""The document that lies in a compressed checkpoint's folder, beside the table for people."""

_TABLE = "compression_report.md"


def write(report: dict[str, Any], folder: Path) -> None:
    """Keep the report in the checkpoint's folder, which is otherwise complete; it gets the names of the ``files``."""
    report["files"] = sorted({REPORT, _TABLE, *(file.name for file in folder.iterdir())})
    write_json(folder / REPORT, report)
    (folder / _TABLE).write_text(as_markdown(report), encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """The report in a checkpoint's folder.

    Raises:
        UserError: there is none, or it is not one that this version could have written.
    """
    try:
        report = read_object(folder / REPORT)
        as_markdown(report)
    except (UserError, ValueError, TypeError, LookupError, AttributeError):
        raise UserError(f"{folder / REPORT}: missing or unreadable; give the folder that compress wrote") from None
    return report


def summary(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The report's headline as (what, value) pairs."""
    calibration = report["calibration"]
    text = "none (plain SVD)"
    if calibration:
        size = f"{calibration['rows']} x {calibration['length']} tokens"
        text = f"{calibration['source']}, {size}, seed {calibration['seed']}"
    return [
        ("model", report["model"]),
        ("method, targets", f"{_method(report)}, {report['targets']}"),
        ("ratio asked", f"{report['asked_ratio']:.2%} of the targeted weights removed"),
        ("ratio realised", f"{report['realised_ratio']:.2%} (ranks in multiples of {report['align']})"),
        ("whole model", f"{report['parameters']['dense']:,} -> {report['parameters']['compressed']:,} parameters "
                        f"({report['model_ratio']:.2%} removed)"),
        ("weight files", f"{report['bytes']['dense'] / 1e6:,.1f} -> {report['bytes']['compressed'] / 1e6:,.1f} MB"),
        ("calibration", text),
        ("mean relative error", f"{report['mean_relative_error']:.4f} (of a factorised linear's output, on that text)"
         if calibration else f"{report['mean_relative_error']:.4f} (of a factorised weight)"),
        *([("block error", f"{loss['before']:.4f} -> {loss['after']:.4f} of the hidden states' power, by refinement, "
                           "on held-out rows")] if (loss := report["block_loss"]) else []),
        *([("recovery", f"{found['loss_before']:.4f} -> {found['loss_after']:.4f} nats a token from the dense model, "
                        f"on held-out rows{'' if found['kept'] else ': no gain, the factors are as they were'}")]
          if (found := report["recovery"]) else []),
        ("time, peak memory", f"{report['seconds']:.0f} s, {report['peak_rss_bytes'] / 2**30:.2f} GiB resident"),
    ]  # fmt: skip


def _method(report: dict[str, Any]) -> str:
    """The method with whatever was added to it."""
    added = [
        "global ranks" if report["allocation"] == "global" else "",
        "shared A" if report["share"] == "auto" else "",
        f"{report['refine']} refinement" if report["refine"] != "off" else "",
        {"off": "", "lora": "LoRA recovery", "factors": "recovery of the factors"}[report["recover"]],
        "int8 factors" if report["factors"] == "int8" else "",
    ]
    return " + ".join([report["method"], *filter(None, added)])


def as_markdown(report: dict[str, Any]) -> str:
    """The table for people: the headline, then a line a matrix."""
    lines = ["# Compression report", ""]
    lines += [f"- {what}: {value}" for what, value in summary(report)]
    lines += ["", "| linear | out x in | rank | removed | relative error |", "|---|---|---:|---:|---:|"]
    for matrix in report["matrices"]:
        rank = matrix["rank"] or "dense"
        shape = " x ".join(map(str, matrix["shape"]))
        removed, error = matrix["realised_ratio"], matrix["relative_error"]
        name = " + ".join([matrix["name"], *(other.rpartition(".")[2] for other in matrix["sharing"])])
        lines.append(f"| {name} | {shape} | {rank} | {removed:.2%} | {error:.4f} |")
    return "\n".join(lines) + "\n"
