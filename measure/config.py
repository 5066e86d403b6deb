"""The settings of a benchmark, an evaluation and a prediction. Every config checks itself when it is created."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neuronmm.kernels.hardware import CORES
from neuronmm.models.errors import UserError
from neuronmm.models.families import TARGETS

MOST_ROWS, MOST_RUNS = 4096, 10_000
"""Upper bounds of the batch size and the rounds, against typing errors."""

MOST_CORES, MOST_PREDICTED_ROWS, MOST_PROMPT_TOKENS = 64, 128, 1 << 20
"""Upper bounds of a prediction; the decode kernels take up to 128 tokens."""


@dataclass(frozen=True)
class BenchmarkConfig:
    """The models and the points to measure. A point is a batch size and a prompt length in tokens.

    Attributes:
        model: a compressed or a dense model.
        baseline: the dense model that a compressed ``model`` is compared with.
        new_tokens: generated tokens per run, at least 2: the first one gives TTFT, the later ones TPOT.
        runs: measured rounds per point.
        threads: torch threads; None leaves them as they are.
        options: options of the backend, as ``load`` takes them.
        draft: as ``load`` takes it: compare plain decoding with drafts, on prompts of words.

    Raises:
        UserError: a number is out of range, or a draft is combined with what it does not support.
    """

    model: str | Path
    baseline: str | Path | None = None
    prompt_lengths: Sequence[int] = (32, 512)
    new_tokens: int = 32
    batches: Sequence[int] = (1,)
    runs: int = 5
    dtype: str = "auto"
    threads: int | None = None
    backend: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    draft: str | Path | None = None

    def __post_init__(self) -> None:
        processors = os.cpu_count() or 1
        lengths, batches = self.prompt_lengths, self.batches
        checks = (
            (bool(lengths) and min(lengths) >= 1, "--prompt-lengths has to be one or more numbers above 0"),
            (bool(batches) and 1 <= min(batches) <= max(batches) <= MOST_ROWS, f"--batch has to be 1 to {MOST_ROWS}"),
            (self.new_tokens >= 2, "--new-tokens has to be 2 or more: TTFT is the first token's, TPOT needs a second"),
            (1 <= self.runs <= MOST_RUNS, f"--runs has to be 1 to {MOST_RUNS}"),
            (
                self.threads is None or 1 <= self.threads <= processors,
                f"--threads has to be 1 to {processors}, the processors of this machine",
            ),
            (
                self.draft is None
                or (self.baseline is None and tuple(batches) == (1,) and self.backend in ("auto", "cpu")),
                "--draft compares a model with itself, one row with --backend cpu; leave out --baseline and --batch",
            ),
        )
        for valid, message in checks:
            if not valid:
                raise UserError(message)

    @property
    def longest(self) -> int:
        """The length of the longest sequence: prompt and new tokens."""
        return max(self.prompt_lengths) + self.new_tokens


@dataclass(frozen=True)
class EvaluationConfig:
    """The models and what to measure of them.

    Attributes:
        model: the model to evaluate.
        baseline: a second model, whose results the differences are taken from.
        text: file for the perplexity: raw text, or .jsonl with a ``text`` per line.
        context: tokens per window; None is 2048, or the model's maximum if that is less.
        stride: tokens from window to window; None is the context.
        tasks: multiple-choice files.
        limit: use only the first windows of the text and the first rows of each task.
        weight_dtype: what the dense weights of ``model`` are rounded to, ``int8`` or ``int4``; None keeps them.

    Raises:
        UserError: there is nothing to measure, two tasks have one name, the limit is out of range, or the backend does
            not evaluate.
    """

    model: str | Path
    baseline: str | Path | None = None
    text: str | Path | None = None
    context: int | None = None
    stride: int | None = None
    tasks: Sequence[str | Path] = ()
    limit: int | None = None
    dtype: str = "auto"
    backend: str = "auto"
    weight_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.text is None and not self.tasks:
            raise UserError("nothing to measure: give --text, --tasks or both")
        if self.text is None and (self.context, self.stride) != (None, None):
            raise UserError("--context and --stride are for --text; tasks use the model's whole context")
        check_count("--limit", self.limit)
        if self.backend == "neuron":
            raise UserError("evaluate runs on cpu and cuda; choose one with --backend")
        by_name(self.tasks)

    @property
    def settings(self) -> dict[str, str | int | list[str] | None]:
        """The options of ``neuronmm evaluate`` besides the models, by name."""
        return {
            "text": None if self.text is None else str(self.text),
            "context": self.context,
            "stride": self.stride,
            "tasks": [str(task) for task in self.tasks] or None,
            "limit": self.limit,
            "dtype": self.dtype,
            "backend": self.backend,
            "weight_dtype": self.weight_dtype,
        }


def check_count(option: str, value: int | None) -> None:
    """Check the number of things to measure, if it is given.

    Raises:
        UserError: it is less than 1.
    """
    if value is not None and value < 1:
        raise UserError(f"{option} is {value}; it has to be 1 or more")


def by_name(files: Sequence[str | Path]) -> dict[str, Path]:
    """Return the files by their names without suffix, under which results name them.

    Raises:
        UserError: two have one name.
    """
    named: dict[str, Path] = {}
    for file in map(Path, files):
        if named.setdefault(file.stem, file) != file:
            raise UserError(f"{named[file.stem]}, {file}: the results would have one name; rename one of the files")
    return named


@dataclass(frozen=True)
class PredictionConfig:
    """The model and the Trainium setup to predict.

    Attributes:
        model: a folder with a config.json, that file, a GGUF file, or a hub id.
        ratio: fraction of the targeted weights to remove, in two factors of uniform rank; None: as compress.
        targets: the linears to factorise: mlp, attention or all; None: as compress. Without ratio and targets the
            ranks of a compressed config.json are taken.
        device: trn1, trn2 or trn3.
        parallel: cores that share the model.
        batch: sequences at once.
        prompt_length: tokens per prompt.

    Raises:
        UserError: the device or the targets are unknown, or a number is out of range.
    """

    model: str | Path
    ratio: float | None = None
    targets: str | None = None
    device: str = "trn1"
    parallel: int = 1
    batch: int = 1
    prompt_length: int = 128

    def __post_init__(self) -> None:
        if self.device not in CORES:
            raise UserError(f"device {self.device}: must be one of {', '.join(CORES)}")
        if self.targets is not None and self.targets not in TARGETS:
            raise UserError(f"targets {self.targets}: must be one of {', '.join(TARGETS)}")
        for name, value, most in (
            ("tp", self.parallel, MOST_CORES),
            ("batch", self.batch, MOST_PREDICTED_ROWS),
            ("prompt-length", self.prompt_length, MOST_PROMPT_TOKENS),
        ):
            if not 1 <= value <= most:
                raise UserError(f"--{name} {value}: must be 1 to {most}")

    @property
    def asks(self) -> bool:
        """Whether the ranks are asked for, rather than those of the config.json."""
        return self.ratio is not None or self.targets is not None
