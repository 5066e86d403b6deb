"""The command lines that repeat what a report page shows."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from neuronmm.compression.config import CompressionConfig
from neuronmm.measure.benchmark_result import BenchmarkResult
from neuronmm.measure.page_inputs import EvaluationDocument
from neuronmm.models.source import short_name

_OPTIONS = ("targets", "method", "allocation", "share_a", "refine", "form")
_LAST = ("factor_dtype", "weight_dtype")  # what the last command of a checkpoint rounds
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def repeating(
    out: str, report: dict[str, Any] | None, evaluations: list[EvaluationDocument], benchmark: BenchmarkResult | None
) -> list[str]:
    """Return the command lines, in order. Settings that have no option stand in a recipe, which the first line writes.

    Args:
        out: the compressed checkpoint as the user named it.
        report: its report; None if it has none.
        evaluations: what ``evaluate --json`` wrote.
        benchmark: what ``benchmark --json`` wrote.
    """
    lines: list[str] = []
    if report is not None:
        file = f"{short_name(out)}-recipe.yaml"
        recipe = _recipe(report, file)
        lines += [*recipe, *_checkpoint(out, report, ["--recipe", file] if recipe else [])]
    lines += [_evaluate(document) for document in evaluations if "model" in document.models and document.settings]
    lines += [] if benchmark is None else [_benchmark(benchmark)]
    return lines


def _line(*words: Any) -> str:
    return shlex.join(["neuronmm", *map(str, words)])


def _recipe(report: dict[str, Any], file: str) -> list[str]:
    """Return the line that writes the recipe ``file``, if a setting without an option differs from the default."""
    usual, text = CompressionConfig(), report["calibration"] or {}
    found = {
        "calibration_rows": text.get("asked_rows", text.get("rows")),
        "calibration_length": text.get("length"),
        "seed": text.get("seed"),
        "damping": report.get("damping"),
    }
    others = [f"{name}: {value}" for name, value in found.items() if value not in (None, getattr(usual, name))]
    return [f"printf '%s\\n' {shlex.join(others)} > {shlex.quote(file)}"] if others else []


def _checkpoint(out: str, report: dict[str, Any], recipe: list[str]) -> list[str]:
    """Return the lines that write the checkpoint: ``compress`` with the words of the ``recipe``, ``recover`` if it ran
    alone, and ``convert`` for each change of form.
    """
    recovery, text = report["recovery"] or {}, report["calibration"] or {}
    conversions = report["conversions"]
    forms = [*(conversion["form"] for conversion in conversions), report.get("form")]
    earlier = [form for one, form in zip(conversions, forms[1:], strict=True) if not one["recovered"]]
    same = (text.get("source"), text.get("rows"), text.get("length"))
    alone = "text" in recovery and (bool(earlier) or _text_of_recovery(recovery) != same)  # older ones have no text
    steps = [("compress", _compression({**report, "form": forms[0]} if conversions else report, not alone, recipe))]
    steps += [("convert", ["--form", form]) for form in earlier]
    steps += [("recover", _recovery(report))] if alone else []
    steps += [("convert", ["--form", form]) for form in forms[1 + len(earlier) :]]
    lines, source = list[str](), report["model"]
    for left, (verb, words) in reversed(list(enumerate(reversed(steps)))):
        target = out + "-before" * left
        lines.append(_line(verb, source, "-o", target, *words))
        source = target
    return lines


def _compression(report: dict[str, Any], last: bool, recipe: list[str]) -> list[Any]:
    """Return the options of ``compress``, with those of the recovery and the rounding if they were its ``last``."""
    budget = report.get("budget")
    words = ["--ratio", report["asked_ratio"]] if budget is None else ["--budget", budget]
    words += _options(report, _OPTIONS)
    words += _options(report, ("recover", *_LAST)) if last else []
    if "asked_align" in report:  # older reports have only the smallest tile
        words += ["--align", report["asked_align"]]
    return [*words, *_texts((report["calibration"] or {}).get("source")), *recipe]


def _recovery(report: dict[str, Any]) -> list[Any]:
    """Return the options of ``recover``."""
    source, rows, length = _text_of_recovery(report["recovery"])
    more = ["--calibration-rows", rows, "--calibration-length", length, *_options(report, _LAST)]
    return ["--train", report["recover"], *_texts(source), *more]


def _options(report: dict[str, Any], names: Sequence[str]) -> list[Any]:
    return [word for name in names if name in report for word in (f"--{name.replace('_', '-')}", report[name])]


def _text_of_recovery(recovery: dict[str, Any]) -> tuple[Any, int, int]:
    """Return the source, the number and the length of the rows that a recovery trained on."""
    rows = recovery["rows"]
    return recovery["text"], rows["trained"] + rows["held_out"], rows["length"]


def _texts(sources: Any) -> list[str]:
    sources = sources if isinstance(sources, list) else [sources] if sources else []
    return [word for source in sources for word in ("--calibration", source)]


def _evaluate(document: EvaluationDocument) -> str:
    words = ["evaluate", document.models["model"].path]
    if "baseline" in document.models:
        words += ["--baseline", document.models["baseline"].path]
    for option, value in document.settings.items():
        if value is not None:
            words += [f"--{option.replace('_', '-')}", *(value if isinstance(value, list) else [value])]
    return _line(*words, "--json")


def _benchmark(benchmark: BenchmarkResult) -> str:
    baseline = [] if benchmark.baseline is None else ["--baseline", benchmark.baseline]
    words = ["benchmark", benchmark.model, *baseline, "--runs", benchmark.runs]
    for option, values in (
        ("--prompt-lengths", [point.prompt_length for point in benchmark.points]),
        ("--batch", [point.batch for point in benchmark.points]),
        ("--new-tokens", [benchmark.new_tokens]),
    ):
        words += [option, ",".join(map(str, dict.fromkeys(values)))]
    rounded = [name for name in ("int8", "int4") if name in benchmark.variants]
    words += ["--threads", benchmark.threads, "--backend", benchmark.backend]
    words += ["--dtype", _DTYPES.get(benchmark.dtype, benchmark.dtype)]
    words += [word for name in rounded for word in ("--weight-dtype", name)]
    return _line(*words, "--json")
