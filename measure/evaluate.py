"""Evaluation: perplexity and multiple-choice accuracy of one model, or of two with their paired difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from neuronmm.engine.backends.torch_runner import TorchRunner
from neuronmm.engine.engine import Engine, load
from neuronmm.measure.bandwidth import factor_bytes
from neuronmm.measure.perplexity import Windows, cut, mean_and_error, read_text, window_nlls
from neuronmm.measure.tasks import Question, answer, encode, guessing, read_task, score
from neuronmm.models.errors import UserError


@dataclass
class Scores:
    """What one model scored: nats a token by window, and 1 or 0 by question for each task's metrics.

    ``dtype`` says in words when the factors are stored in another one.
    """

    path: str
    dtype: str
    windows: Windows | None
    nlls: list[float]
    correct: dict[str, list[float]]


def evaluate(
    model: str | Path,
    baseline: str | Path | None = None,
    *,
    text: str | Path | None = None,
    context: int | None = None,
    stride: int | None = None,
    tasks: Sequence[str | Path] = (),
    limit: int | None = None,
    dtype: str = "auto",
    backend: str = "auto",
    progress: bool = False,
) -> dict[str, Any]:
    """Evaluate ``model``, and ``baseline`` beside it; the result is plain values, ready for JSON.

    The models run one after the other through the same kernels that generate. Each measure has a value and a standard
    error: of a perplexity by propagating that of the mean over windows (the tokens of a window depend on each other,
    windows far less), of an accuracy over questions. The difference is ``model`` minus ``baseline``, paired by window
    or question.

    Raises:
        UserError: nothing to measure, an unreadable file, a value out of range, or models that tokenise differently.
    """
    if text is None and not tasks:
        raise UserError("nothing to measure: give --text, --tasks or both")
    if limit is not None and limit < 1:
        raise UserError(f"--limit is {limit}; it has to be 1 or more")
    content = None if text is None else read_text(Path(text))
    questions = {Path(path).stem: read_task(Path(path), limit) for path in tasks}
    names = {"model": model} if baseline is None else {"baseline": baseline, "model": model}
    scores = {}
    with Progress(console=Console(stderr=True), disable=not progress) as bar:
        for name, path in names.items():
            engine = load(path, backend=backend, dtype=dtype)
            scores[name] = _score(engine, str(path), name, content, context, stride, limit, questions, bar)
            del engine  # before the next one is loaded
    results, notes = [], []
    windows = scores["model"].windows
    if windows is not None:
        if any(not _same(windows, other.windows) for other in scores.values()):
            raise UserError(f"{model} and {baseline} tokenise the text differently; their perplexities do not compare")
        results += _perplexities(scores)
        notes.append(_describe(windows))
    for key in next(iter(scores.values())).correct:
        results.append(_measure(key, {name: entry.correct[key] for name, entry in scores.items()}))
    blind = {name: guessing(rows) for name, rows in questions.items()}
    if questions:
        notes.append("acc: likeliest choice; acc_norm: log-likelihood divided by the choice's length in characters")
        notes.append("guessing gives " + ", ".join(f"{name} {share:.1%}" for name, share in blind.items()))
    return {
        "kind": "measured",
        "what": "evaluation",
        "models": {name: {"path": entry.path, "dtype": entry.dtype} for name, entry in scores.items()},
        "text": None if windows is None else {"file": str(text), **_facts(windows)},
        "tasks": {name: len(rows) for name, rows in questions.items()},
        "guessing": blind,
        "results": results,
        "notes": notes,
    }


def _score(
    engine: Engine,
    path: str,
    name: str,
    content: str | None,
    context: int | None,
    stride: int | None,
    limit: int | None,
    questions: dict[str, list[Question]],
    bar: Progress,
) -> Scores:
    """Everything that is measured of one model."""
    host = engine.runner
    if not isinstance(host, TorchRunner):
        raise UserError("evaluate runs on cpu and cuda; choose one with --backend")
    dtype = str(host.dtype).removeprefix("torch.")
    for precision in factor_bytes(host.model).keys() - {dtype}:
        dtype += f", {precision} factors"
    result = Scores(path, dtype, None, [], {})
    if content is not None:
        windows = cut(engine.tokenizer, content, engine.context, context, stride, limit)
        task = bar.add_task(f"{name}: perplexity", total=len(windows.starts))
        result.windows = windows
        result.nlls = window_nlls(host.model, windows, partial(bar.advance, task))
    for label, rows in questions.items():
        groups = [[encode(engine.tokenizer, *pair, engine.context) for pair in row.pairs] for row in rows]
        task = bar.add_task(f"{name}: {label}", total=sum(map(len, groups)))
        scores = score(host.model, groups, partial(bar.advance, task))
        for metric, correct in answer(rows, scores).items():
            result.correct[f"{label} {metric}"] = correct
    return result


def _same(one: Windows, other: Windows | None) -> bool:
    return other is not None and one.starts == other.starts and one.ids.tolist() == other.ids.tolist()


def _measure(label: str, values: dict[str, list[float]]) -> dict[str, Any]:
    """Mean and standard error of each model's values, and of their paired difference."""
    entry: dict[str, Any] = {"measure": label, "models": {name: _estimate(v) for name, v in values.items()}}
    if len(values) > 1:
        entry["difference"] = _estimate([a - b for a, b in zip(values["model"], values["baseline"], strict=True)])
    return entry


def _estimate(values: list[float]) -> dict[str, Any]:
    mean, error = mean_and_error(values)
    return {"value": mean, "standard_error": error}


def _perplexities(scores: dict[str, Scores]) -> list[dict[str, Any]]:
    """Perplexity exp(mean nats), its errors to first order, and the mean itself.

    d exp(m) = exp(m) dm, so a window's share in the perplexity's deviation is exp(m) times its nats; the difference of
    two perplexities is that of the two shares, window by window. All windows score the same number of tokens.
    """
    nats = _measure("nats per token", {name: entry.nlls for name, entry in scores.items()})
    try:
        factors = {name: math.exp(nats["models"][name]["value"]) for name in scores}
    except OverflowError:
        worst = max(nats["models"][name]["value"] for name in scores)
        raise UserError(f"{worst:.0f} nats a token is a perplexity beyond all numbers; the model is damaged") from None
    shares = {name: [factors[name] * value for value in entry.nlls] for name, entry in scores.items()}
    perplexity = _measure("perplexity", shares)
    for name, factor in factors.items():
        perplexity["models"][name]["value"] = factor
    if "difference" in perplexity:
        perplexity["difference"]["value"] = factors["model"] - factors["baseline"]
    return [perplexity, nats]


def _facts(windows: Windows) -> dict[str, int]:
    return {
        "context": windows.context,
        "stride": windows.stride,
        "windows": len(windows.starts),
        "scored_tokens": windows.scored_tokens,
        "text_tokens": len(windows.ids),
    }


def _describe(windows: Windows) -> str:
    return (
        f"perplexity: {len(windows.starts)} windows of {windows.context} tokens, stride {windows.stride}, "
        f"{windows.scored_tokens} of {len(windows.ids)} tokens scored; special tokens only where the tokenizer "
        "puts them, at the start of the text; standard error over windows"
    )
