"""The report of a compression: a JSON document and a Markdown table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from neuronmm.compression import model_card
from neuronmm.compression.config import renamed
from neuronmm.models.documents import read_object, write_json
from neuronmm.models.errors import UserError


class Matrix(TypedDict):
    """One targeted linear, or the leader of several that share an A, with the sizes of all of them.

    ``sharing`` names the others. ``rank`` is None for a dense linear. The error is relative to the norm of the dense
    output; with ``svd`` and ``asvd`` to that of the weight, plain or scaled; for ``fisher`` it is the root of the
    fraction of the linear's effect on the predictions that is lost.
    ``spectrum`` has the errors at 1/16, 2/16, ..., 15/16 of the full rank; None for a dense linear and in old reports.
    ``pivot_condition`` is the condition number of the pivots; None without pivots, or if they are dependent.
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
    spectrum: list[float] | None
    pivot_condition: float | None


REPORT = "compression_report.json"
"""The file name of the JSON document in the folder of a compressed checkpoint."""

SETTINGS = (
    "budget", "allocation", "share_a", "refine", "recover", "form", "factor_dtype", "weight_dtype", "damping",
)  # fmt: skip
"""The settings that the report adds to those of the checkpoint's ``quantization_config``."""

_TABLE = "compression_report.md"


def write(report: dict[str, Any], folder: Path) -> None:
    """Write the report and the model card into the folder of an otherwise complete checkpoint.

    ``files`` of the report lists all files of the folder, by their paths in it.
    """
    model_card.write(report, folder, warnings(report))
    files = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    report["files"] = sorted({REPORT, _TABLE, *files})
    write_json(folder / REPORT, report)
    (folder / _TABLE).write_text(as_markdown(report), encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """Return the report in a checkpoint's folder, with old names of settings replaced.

    Raises:
        UserError: there is none, or it lacks a field.
    """
    try:
        report = renamed(read_object(folder / REPORT), notice=False)
        as_markdown(report)
        for conversion in report.setdefault("conversions", []):  # older reports have none
            if conversion["form"] not in ("two", "pivoted") or not isinstance(conversion["recovered"], bool):
                raise ValueError
        for matrix in report["matrices"]:
            out_features, in_features = matrix["shape"]
            rank, spectrum = matrix["rank"] or 1, matrix.setdefault("spectrum", None) or ()
            if min(out_features, in_features, rank, matrix["dense_parameters"]) < 1:
                raise ValueError
            if rank > min(out_features, in_features) or not all(0 <= error <= 1 for error in spectrum):
                raise ValueError
    except (UserError, ValueError, TypeError, LookupError, AttributeError, OverflowError):
        raise UserError(f"{folder / REPORT}: missing or unreadable; give the folder that compress wrote") from None
    return report


def summary(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the summary of the report as (name, value) pairs."""
    calibration = report["calibration"]
    text = "none"
    if calibration:
        size = f"{calibration['rows']} x {calibration['length']} tokens"
        asked = calibration.get("asked_rows", 0)  # older reports have none
        size += f" (of {asked} rows asked)" if calibration["rows"] < asked else ""
        sources = calibration["source"]
        names = ", ".join(map(str, sources)) if isinstance(sources, list) else sources
        text = f"{names}, {size}, seed {calibration['seed']}"
    rounded = report.get("weight_dtype", "model")  # older reports have none
    return [
        ("model", report["model"]),
        *(_factorisation_rows(report) if report["asked_ratio"] > 0 else []),
        *([("dense weights", f"{rounded}, embedding and head int8")] if rounded != "model" else []),
        ("weight files", f"{report['bytes']['dense'] / 1e6:,.1f} -> {report['bytes']['compressed'] / 1e6:,.1f} MB"),
        ("calibration", text),
        *([("mean relative error", f"{report['mean_relative_error']:.4f} (of a factorised {loss_kind(report)})")]
          if report["asked_ratio"] > 0 else []),
        *([("block error", f"{loss['before']:.4f} -> {loss['after']:.4f} of the hidden states' power, by refinement, "
                           "on held-out rows")] if (loss := report["block_loss"]) else []),
        *([("recovery", f"{loss['loss_before']:.4f} -> {loss['loss_after']:.4f} nats per token from the dense model, "
                        f"on held-out rows{'' if loss['kept'] else ': no gain, the factors did not change'}")]
          if (loss := report["recovery"]) else []),
        *_distance_row(report),
        ("time, peak memory", f"{report['seconds']:.0f} s, {report['peak_rss_bytes'] / 2**30:.2f} GiB resident"),
    ]  # fmt: skip


def loss_kind(report: dict[str, Any]) -> str:
    """Return what the relative error of a linear is relative to, after the words "of a"."""
    if not report["calibration"] or report["method"] == "svd":
        return "weight"
    if report["method"] == "asvd":
        return "weight, scaled by the sizes of its inputs"
    if report["method"] == "fisher":
        return "linear's effect on the predictions, on that text"
    return "linear's output, on that text"


def _factorisation_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows about what was factorised."""
    return [
        ("method, targets", f"{_method(report)}, {report['targets']}"),
        _ratio_row(report),
        ("ratio realised", f"{report['realised_ratio']:.2%} (ranks in multiples of {report['align']})"),
        ("whole model", f"{report['parameters']['dense']:,} -> {report['parameters']['compressed']:,} parameters "
                        f"({_removed(report['model_ratio'])})"),
    ]  # fmt: skip


def _removed(share: float) -> str:
    """Return the share of the parameters that is removed; two factors of a high rank are larger than the linear."""
    return f"{abs(share):.2%} {'removed' if share >= 0 else 'added'}"


def _ratio_row(report: dict[str, Any]) -> tuple[str, str]:
    """Return the row about the ratio, which the user gave, or which the budget allows."""
    ratio = f"{report['asked_ratio']:.2%} of the targeted weights removed"
    if report.get("budget") is None:
        return "ratio asked", ratio
    search = report["search"]
    found = {trial["ratio"]: trial["kl"] for trial in search["trials"]}[report["asked_ratio"]]
    before = "before refinement " if report["refine"] != "off" else ""
    return "ratio found", (
        f"{ratio}; {before}{found + search['rounding']:.3f} nats per token, the budget is {report['budget']:g}"
    )


def warnings(report: dict[str, Any]) -> list[str]:
    """Return the sentences that a user has to read before the checkpoint is used; older reports have none."""
    return (report.get("fidelity") or {}).get("warnings", [])


def _distance_row(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the row about the measured distance from the dense model, if there is one."""
    distance = (report.get("fidelity") or {}).get("distance")
    if not distance or distance["kl"] is None:
        return []
    error = "" if distance["kl_standard_error"] is None else f" ± {distance['kl_standard_error']:.3f}"
    measured = f"{distance['kl']:.3f}{error} nats per token (KL divergence), the same next token in"
    size = f"{distance['rows']} x {distance['length']} {tokens_of(report)}"
    return [("distance from dense", f"{measured} {distance['agreement']:.1%} of {size}")]


def tokens_of(report: dict[str, Any]) -> str:
    """Return what the tokens are on which the distance was measured, and of which checkpoint, if not of this one."""
    fitted = not report["fidelity"]["distance"].get("held_out", True)  # older reports do not say
    tokens = "tokens that the factors were fitted to" if fitted else f"held-out tokens{of_other_text(report)}"
    if report.get("budget") is not None and not of_other_text(report):
        tokens += ", by which the ratio was chosen"
    return tokens + (", before the form was changed" if report["fidelity"].get("converted_since") else "")


def of_other_text(report: dict[str, Any]) -> str:
    """Return of which text the held-out tokens are, if it is not that of the calibration: recovery may have its own."""
    text = report["fidelity"].get("text")  # older reports have none
    if text is None or text == (report["calibration"] or {}).get("source"):
        return ""
    return f" of {text if isinstance(text, str) else ' and '.join(text)}"


def _method(report: dict[str, Any]) -> str:
    """Return the method and the steps added to it."""
    steps = [
        "global ranks" if report["allocation"] == "global" else "",
        "shared A" if report["share_a"] == "auto" else "",
        "pivoted" if report.get("form") == "pivoted" else "",
        f"{report['refine']} refinement" if report["refine"] != "off" else "",
        {"off": "", "lora": "LoRA recovery", "factors": "recovery of the factors"}[report["recover"]],
        f"{report['factor_dtype']} factors" if report["factor_dtype"] != "model" else "",
    ]
    return " + ".join([report["method"], *filter(None, steps)])


def as_markdown(report: dict[str, Any]) -> str:
    """Return the Markdown table: the summary, then one row per matrix."""
    lines = ["# Compression report", ""]
    lines += [f"- {what}: {value}" for what, value in summary(report)]
    lines += [f"- **warning**: {warning}" for warning in warnings(report)]
    lines += _samples(report)
    lines += ["", "| linear | out x in | rank | removed | relative error |", "|---|---|---:|---:|---:|"]
    for matrix in report["matrices"]:
        rank = matrix["rank"] or "dense"
        shape = " x ".join(map(str, matrix["shape"]))
        removed, error = matrix["realised_ratio"], matrix["relative_error"]
        name = " + ".join([matrix["name"], *(other.rpartition(".")[2] for other in matrix["sharing"])])
        lines.append(f"| {name} | {shape} | {rank} | {removed:.2%} | {error:.4f} |")
    return "\n".join(lines) + "\n"


def _samples(report: dict[str, Any]) -> list[str]:
    """Return the texts of the dense and of the compressed model, one after the other for each prompt."""
    lines: list[str] = []
    for sample in (report.get("fidelity") or {}).get("samples", []):
        lines += ["", f"## {sample['prompt']}"]
        for which in ("dense", "compressed"):
            note = " (repeats itself)" if sample[which]["loops"] else ""
            lines += ["", f"The {which} model{note}:", ""]
            lines += [f"    {line}" for line in sample[which]["text"].splitlines()]
    return [*lines, "", "## Linears"] if lines else []
