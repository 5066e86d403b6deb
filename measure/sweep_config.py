"""The settings of a sweep: the points to create, and what to measure of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from neuronmm.compression.config import BARE, RENAMED, CompressionConfig
from neuronmm.measure.config import by_name, check_count
from neuronmm.models.errors import UserError
from neuronmm.models.source import expanded

ROUNDED: dict[str, dict[str, Any]] = {
    "int8": {"factor_dtype": "int8", "weight_dtype": "int8"},
    "int4": {"factor_dtype": "int4", "weight_dtype": "int4"},
}
"""Word -> the settings that store all weights in few bits; alone, the word is a method without factors."""


@dataclass(frozen=True)
class PlannedPoint:
    """A method at a ratio. ``settings``: what the words of the method's ``name`` stand for."""

    name: str
    settings: dict[str, Any]
    config: CompressionConfig

    @property
    def folder(self) -> str:
        """The name of the checkpoint's folder in the sweep's folder."""
        short = f"{self.config.ratio:g}"
        return f"{self.name}-{short if float(short) == self.config.ratio else self.config.ratio}"


@dataclass(frozen=True)
class SweepConfig:
    """The points of a sweep, every method at every ratio, and what to measure of them.

    Attributes:
        ratios: fractions of the targeted weights to remove.
        methods: as :func:`parse_method` reads them.
        texts: files for the perplexity.
        base: the settings that all points share; by default those of ``compress``, without the additions that a
            method's words can name.
        context: tokens per window; by default as ``evaluate`` chooses.
        limit: use only the first windows of each text.
        tasks: multiple-choice files for the accuracy.
        questions: use only the first questions of each task.
        speed: measure tokens/s of each point beside the dense model.

    Raises:
        UserError: a ratio, method or text is missing, a method or setting is invalid, or two texts or two tasks have
            one name.
    """

    ratios: Sequence[float]
    methods: Sequence[str]
    texts: Sequence[str | Path]
    base: CompressionConfig = field(default_factory=lambda: CompressionConfig.build(**BARE))
    context: int | None = None
    limit: int | None = None
    tasks: Sequence[str | Path] = ()
    questions: int | None = None
    speed: bool = False

    def __post_init__(self) -> None:
        if not self.points or not self.text_files:
            raise UserError("a sweep needs one or more ratios, methods and texts")
        check_count("--limit", self.limit)
        check_count("--questions", self.questions)
        if self.questions is not None and not self.tasks:
            raise UserError("--questions is for --tasks; give both or neither")
        by_name(self.tasks)
        if self.base.budget is not None:
            raise UserError("a sweep compresses by ratio; leave the budget out of the recipe")

    @property
    def points(self) -> list[PlannedPoint]:
        """The points in the order of their creation: at each ratio those with recovery last.

        A method without factors has one point, of the ratio 0.
        """
        settings = {name: parse_method(name, self.base.form) for name in self.methods}
        names = sorted(settings, key=lambda name: "recover" in settings[name])
        configs = {(name, ratio): self._config(ratio, settings[name]) for ratio in self.ratios for name in names}
        points = {(name, config.ratio): config for (name, _), config in configs.items()}
        return [PlannedPoint(name, settings[name], config) for (name, _), config in points.items()]

    def _config(self, ratio: float, settings: dict[str, Any]) -> CompressionConfig:
        without_factors = {"recover": "off", "factor_dtype": "model"} if settings.get("ratio") == 0 else {}
        return CompressionConfig.build(
            None, **{**self.base.model_dump(), **without_factors, "ratio": ratio, **settings}
        )

    @property
    def text_files(self) -> dict[str, Path]:
        """The absolute paths of the texts by name."""
        return {name: expanded(text).absolute() for name, text in by_name(self.texts).items()}

    @property
    def task_files(self) -> dict[str, Path]:
        """The absolute paths of the tasks by name."""
        return {name: expanded(task).absolute() for name, task in by_name(self.tasks).items()}


def parse_method(text: str, form: str = "two") -> dict[str, Any]:
    """Return the settings of a method such as ``anchored+fast``; ``form`` is that of a method without such a word.

    A word is a value of a setting with named values (``whitened``), the name of a setting that has one value beside
    ``off`` (``share_a``, formerly ``share``), or one of :data:`ROUNDED`.

    Raises:
        UserError: a word is unknown, ambiguous, or contradicts another.
    """
    if text in ROUNDED:
        plain = {"method": "svd"} if text == "int8" else {}  # its rounding needs no text, which may take long to sample
        return {"ratio": 0.0, "weight_dtype": text, **plain}
    meanings: dict[str, list[dict[str, Any]]] = {word: [settings] for word, settings in ROUNDED.items()}
    for name, field_info in CompressionConfig.model_fields.items():
        if name in ("factor_dtype", "weight_dtype"):
            continue
        values = get_args(field_info.annotation) if get_origin(field_info.annotation) is Literal else ()
        for value in values:
            word = name if len(values) == 2 and values[0] == "off" and value == values[1] else value
            meanings.setdefault(str(word), []).append({name: value})
    settings: dict[str, Any] = {}
    for word in text.split("+"):
        candidates = meanings.get(word) or meanings.get(RENAMED.get(word, word), [])
        if len(candidates) != 1:
            known = ", ".join(word for word, several in meanings.items() if len(several) == 1)
            raise UserError(f"--methods {text}: {word!r} is not one of {known}")
        for name, value in candidates[0].items():
            if name in settings:
                raise UserError(f"--methods {text}: {settings[name]!r} and {word!r} are both a {name}")
            settings[name] = value
    if settings.get("form", form) == "pivoted" and settings.get("factor_dtype") == "int4":
        settings["factor_dtype"] = "int8"  # pivoted factors have no int4
    return settings
