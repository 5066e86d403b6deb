"""The model card of a compressed checkpoint: README.md with the hub's metadata, without any path of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from neuronmm.models.errors import printable

CARD = "README.md"
"""The file name of the card in the folder of a checkpoint."""

_TARGETS = {"mlp": "the MLP", "attention": "attention", "all": "attention and the MLP"}


def write(report: dict[str, Any], folder: Path, warnings: list[str]) -> None:
    """Write the card of the checkpoint in ``folder``, unless it has one. ``warnings`` are those of the report."""
    if not (folder / CARD).exists():
        ModelCard(_content(report, warnings)).save(folder / CARD)


def _content(report: dict[str, Any], warnings: list[str]) -> str:
    model, targets = str(report["model"]), str(report["targets"])
    base = _hub_id(model)
    name = _code(base or Path(model).name)
    factorised, rounded = report["asked_ratio"] > 0, report.get("weight_dtype", "model")
    steps, removed = list[str](), list[str]()
    if factorised:
        where, method = _TARGETS.get(targets, _code(targets)), _code(report["method"])
        steps.append(f"the linears of {where} were replaced by low-rank factors (method {method})")
        share, of_model = report["realised_ratio"], report["model_ratio"]
        what = "Removed" if share >= 0 else "Added"  # two factors of a high rank are larger than the linear
        removed = ["", f"{what}: {abs(share):.2%} of the targeted weights, {abs(of_model):.2%} of the model."]
    if rounded != "model":
        steps.append(f"the dense linears were rounded to {_code(rounded)}, embedding and head to int8")
    data = ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["neuronmm", *(["svd", "low-rank"] if factorised else []), "compressed"],
    )
    parameters, size = report["parameters"], report["bytes"]
    lines = [
        f"# {name}, {'compressed by SVD' if factorised else f'in {rounded}'}",
        "",
        f"In {name}, {' and '.join(steps)}, by neuronmm {_code(report['version'])}.",
        "",
        "| | dense | compressed |",
        "|---|---:|---:|",
        f"| parameters | {parameters['dense']:,} | {parameters['compressed']:,} |",
        f"| weight files, MB | {size['dense'] / 1e6:,.1f} | {size['compressed'] / 1e6:,.1f} |",
        *removed,
        *_distance(report),
        *(f"\n**Warning:** {printable(warning)}" for warning in warnings),
        "",
        "## Use",
        "",
        "```python",
        "import neuronmm  # registers the format",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        "```",
        "",
        "`compression_report.md` lists the loss of every matrix, and what both models write.",
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines) + "\n"


def _distance(report: dict[str, Any]) -> list[str]:
    """Return the sentence about the measured distance from the dense model, if there is one."""
    distance = (report.get("fidelity") or {}).get("distance")
    if not distance or distance["kl"] is None:
        return []
    error = "" if distance["kl_standard_error"] is None else f" ± {distance['kl_standard_error']:.3f}"
    same = report["fidelity"].get("text") in (None, (report["calibration"] or {}).get("source"))
    text = "calibration" if same else "recovery's"
    when = "before the form of the factors was changed, " if report["fidelity"].get("converted_since") else ""
    chosen = ", by which the ratio was chosen," if report.get("budget") is not None and same else ""
    tokens = (
        f"held-out tokens{chosen}" if distance.get("held_out", True) else "tokens, which the factors were fitted to,"
    )
    return [
        "",
        f"Measured {when}on {distance['rows']} x {distance['length']} {tokens} of the {text} text: a KL "
        f"divergence of {distance['kl']:.3f}{error} nats per token from the dense model, and the same next token in "
        f"{distance['agreement']:.1%}.",
    ]


def _code(text: str) -> str:
    """Return ``text``, which may be of unknown origin, as Markdown code on one line."""
    return "`" + printable(text).replace("`", "'") + "`"


def _hub_id(model: str) -> str | None:
    """Return the id on the hub that the dense model was named by; None for a file or folder of this machine."""
    if os.path.exists(os.path.expanduser(model)) or "/" not in model:
        return None
    try:
        validate_repo_id(model)
    except HFValidationError:
        return None
    return model
