"""Evaluation: perplexity and multiple-choice accuracy of one model, or of two with their paired difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from neuronmm.engine.backends import choose
from neuronmm.engine.backends.torch_runner import TorchRunner
from neuronmm.engine.engine import pick_dtype
from neuronmm.measure.bandwidth import factor_bytes
from neuronmm.measure.config import EvaluationConfig, by_name
from neuronmm.measure.perplexity import Windows, cut, read_text, window_nlls
from neuronmm.measure.statistics import Estimate, estimate
from neuronmm.measure.tasks import Choice, Question, answer, encode, guessing, read_task, score
from neuronmm.models.contents import inspect
from neuronmm.models.errors import UserError
from neuronmm.models.load import load_config, load_tokenizer, positions_of
from neuronmm.models.low_bits import check_rounding, weight_dtype_of
from neuronmm.models.progress import Progress, no_progress
from neuronmm.models.source import resolve


@dataclass(frozen=True)
class ModelFacts:
    """An evaluated model. ``dtype`` also names the dtype of the factors if that is another one."""

    path: str
    dtype: str


@dataclass(frozen=True)
class Measure:
    """One measure of every model by name, and the paired difference ``model`` minus ``baseline`` if there are two."""

    measure: str
    models: dict[str, Estimate]
    difference: Estimate | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, without a difference that does not exist."""
        values = asdict(self)
        if self.difference is None:
            del values["difference"]
        return values


@dataclass(frozen=True)
class EvaluationResult:
    """All that ``neuronmm evaluate`` reports.

    Attributes:
        models: the models by name, ``model`` and ``baseline``.
        text: the file of the perplexity, the sizes of its windows, and the log loss of each window by model, from which
            runs can be paired afterwards.
        tasks: the number of questions of each task.
        guessing: the expected accuracy of random choices for each task.
        results: the measures.
        notes: sentences below the table.
        settings: the options of the command besides the models, by name.
    """

    models: dict[str, ModelFacts]
    text: dict[str, Any] | None
    tasks: dict[str, int]
    guessing: dict[str, float]
    results: list[Measure]
    notes: list[str]
    settings: dict[str, str | int | list[str] | None]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document."""
        results = [measure.to_json() for measure in self.results]
        return {"kind": "measured", "what": "evaluation", **asdict(self), "results": results}

    def of_model(self) -> dict[str, Estimate]:
        """Return the estimates of ``model`` by measure."""
        return {measure.measure: measure.models["model"] for measure in self.results}


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
    weight_dtype: str | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Evaluate ``model``, and ``baseline`` beside it, and return the JSON document.

    The arguments are those of :class:`.EvaluationConfig`. See :func:`run_evaluation`.
    """
    config = EvaluationConfig(model, baseline, text, context, stride, tasks, limit, dtype, backend, weight_dtype)
    return run_evaluation(config, progress).to_json()


def run_evaluation(config: EvaluationConfig, progress: Progress = no_progress) -> EvaluationResult:
    """Evaluate the models one after the other, in torch, which reads long texts as prompts are read.

    The standard error of an accuracy is over questions. That of a perplexity follows from the mean over windows:
    tokens of one window depend on each other, windows far less. The difference is paired by window or question.

    Raises:
        UserError: a file is unreadable, a value is out of range, or the models tokenise differently.
    """
    content = None if config.text is None else read_text(Path(config.text))
    questions = {name: read_task(path, config.limit) for name, path in by_name(config.tasks).items()}
    # one backend for both models: their difference is that of the weights alone
    options = {} if config.weight_dtype is None else {"weight_dtype": config.weight_dtype}
    config = replace(config, backend=choose(config.backend, options).name)
    names = {"model": config.model} if config.baseline is None else {"baseline": config.baseline, "model": config.model}
    jobs = {
        name: _prepare(name, path, config, content, questions, partial(_of_model, progress, name))
        for name, path in names.items()
    }
    windows = jobs["model"].windows
    _check_comparable(config, windows, jobs.get("baseline", jobs["model"]).windows)
    scores = {name: _score(job, config, questions, partial(_of_model, progress, name)) for name, job in jobs.items()}
    results, notes, text = [], [], None
    if windows is not None:
        nlls = {name: entry.nlls for name, entry in scores.items()}
        results += _perplexities(nlls)
        text = {"file": str(config.text), **windows.to_json(), "nats_per_token_by_window": nlls}
        notes.append(windows.describe())
    for label in scores["model"].correct:
        results.append(_measure(label, {name: entry.correct[label] for name, entry in scores.items()}))
    chance = {name: guessing(rows) for name, rows in questions.items()}
    if questions:
        notes.append("acc: likeliest choice; acc_norm: log-likelihood divided by the choice's length in characters")
        notes.append("guessing gives " + ", ".join(f"{name} {share:.1%}" for name, share in chance.items()))
    return EvaluationResult(
        models={name: entry.facts for name, entry in scores.items()},
        text=text,
        tasks={name: len(rows) for name, rows in questions.items()},
        guessing=chance,
        results=results,
        notes=notes,
        settings=config.settings,
    )


def _of_model(progress: Progress, model: str, stage: str, fraction: float) -> None:
    progress(f"{model}: {stage}", fraction)


@dataclass(frozen=True)
class _Job:
    """What to score with one model: the windows of the text, and by task the tokens of each question's choices.

    ``options`` are those of the backend.
    """

    path: str | Path
    folder: Path
    dtype: torch.dtype
    options: dict[str, Any]
    windows: Windows | None
    choices: dict[str, list[list[Choice]]]


@dataclass(frozen=True)
class _Scores:
    """The scores of one model: nats per token by window, and for each task's metrics 1 or 0 per question."""

    facts: ModelFacts
    nlls: list[float]
    correct: dict[str, list[float]]


def _prepare(
    name: str,
    path: str | Path,
    config: EvaluationConfig,
    content: str | None,
    questions: dict[str, list[Question]],
    progress: Progress,
) -> _Job:
    """Check one model and its options, and tokenise the text and the questions for it, before any model is loaded.

    Raises:
        UserError: the model or an option is at fault, or a window or a question does not fit the model.
    """
    rounded = config.weight_dtype if name == "model" else None
    folder = resolve(path, progress)
    dtype = pick_dtype(folder, config.dtype)
    spec = inspect(folder).spec
    if rounded is not None:
        check_rounding(rounded, "model" if spec is None else spec.weights)
    tokenizer, context = load_tokenizer(folder), positions_of(load_config(folder))
    windows = None
    if content is not None:
        sizes = {"context": config.context, "stride": config.stride, "limit": config.limit}
        windows = cut(tokenizer, content, context, **sizes)
    choices = {label: [encode(tokenizer, row, context) for row in rows] for label, rows in questions.items()}
    return _Job(path, folder, dtype, {} if rounded is None else {"weight_dtype": rounded}, windows, choices)


def _check_comparable(config: EvaluationConfig, windows: Windows | None, others: Windows | None) -> None:
    """Check that both models score the same tokens behind the same ones.

    Raises:
        UserError: they do not.
    """
    if windows is None or others is None:
        return
    if not windows.same_tokens(others):
        raise UserError(
            f"{config.model} and {config.baseline} tokenise the text differently; their perplexities do not compare"
        )
    if not windows.same_sizes(others):
        raise UserError(
            f"{config.model} takes windows of {windows.context} tokens and {config.baseline} of {others.context}; give "
            f"--context {min(windows.context, others.context)} or less for both"
        )


def _score(job: _Job, config: EvaluationConfig, questions: dict[str, list[Question]], progress: Progress) -> _Scores:
    """Load one model and score the text and the questions with it."""
    runner = choose(config.backend, job.options).load(job.folder, job.dtype, "auto", **job.options)
    assert isinstance(runner, TorchRunner)  # EvaluationConfig takes no other backend
    dtype = str(runner.dtype).removeprefix("torch.")
    for precision in factor_bytes(runner.model).keys() - {dtype}:
        dtype += f", {precision} factors"
    rounded = weight_dtype_of(runner.model)
    dtype += f", {rounded} weights" if rounded else ""
    nlls, correct = list[float](), dict[str, list[float]]()
    if job.windows is not None:
        nlls = window_nlls(runner.model, job.windows, partial(progress, "perplexity"))
    for label, rows in questions.items():
        scores = score(runner.model, job.choices[label], partial(progress, label))
        correct |= {f"{label} {metric}": values for metric, values in answer(rows, scores).items()}
    return _Scores(ModelFacts(str(job.path), dtype), nlls, correct)


def _measure(label: str, values: dict[str, list[float]]) -> Measure:
    """Return the estimate of each model's values, and of their paired difference."""
    models = {name: estimate(scores) for name, scores in values.items()}
    if "baseline" not in values:
        return Measure(label, models)
    paired = zip(values["model"], values["baseline"], strict=True)
    return Measure(label, models, estimate([model - baseline for model, baseline in paired]))


def _perplexities(nlls: dict[str, list[float]]) -> list[Measure]:
    """Return the perplexity exp(mean nats) with its errors to first order, and the mean itself.

    d exp(m) = exp(m) dm, so a window contributes exp(m) times its nats to the deviation of the perplexity. The
    difference of two perplexities has the difference of their contributions, window by window. All windows score the
    same number of tokens.
    """
    nats = _measure("nats per token", nlls)
    try:
        values = {name: math.exp(mean.value) for name, mean in nats.models.items()}
    except OverflowError:
        worst = max(mean.value for mean in nats.models.values())
        raise UserError(
            f"{worst:.0f} nats per token give a perplexity too large for a float; the model is damaged"
        ) from None
    errors = _measure("perplexity", {name: [values[name] * nll for nll in row] for name, row in nlls.items()})
    models = {name: Estimate(values[name], error.standard_error) for name, error in errors.models.items()}
    if errors.difference is None:
        return [Measure("perplexity", models), nats]
    difference = Estimate(values["model"] - values["baseline"], errors.difference.standard_error)
    return [Measure("perplexity", models, difference), nats]
