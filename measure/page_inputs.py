"""The measurements that a report page shows: JSON documents of other commands, checked before anything is drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, Field, FiniteFloat, PositiveInt, TypeAdapter, ValidationError

from neuronmm.measure.benchmark_result import BenchmarkResult
from neuronmm.measure.sweep_points import SweepPoint
from neuronmm.models.documents import read_object
from neuronmm.models.errors import UserError, first_problem

T = TypeVar("T")
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class EstimateDocument(BaseModel):
    """A mean and its standard error."""

    value: FiniteFloat
    standard_error: NotNegative | None


class ScoreDocument(EstimateDocument):
    """A perplexity or an accuracy."""

    value: NotNegative


class ModelDocument(BaseModel):
    """An evaluated model."""

    path: str
    dtype: str


class MeasureDocument(BaseModel):
    """One measure of every model, and the paired difference if there are two."""

    measure: str
    models: dict[str, ScoreDocument]
    difference: EstimateDocument | None = None


class EvaluationDocument(BaseModel):
    """What ``neuronmm evaluate --json`` prints."""

    what: Literal["evaluation"]
    models: dict[str, ModelDocument]
    text: dict[str, Any] | None
    results: list[MeasureDocument] = Field(min_length=1)
    notes: list[str]
    settings: dict[str, str | int | list[str] | None] = {}


class _SweepPointDocument(BaseModel):
    name: str
    ratio: FiniteFloat
    targets: Literal["mlp", "attention", "all"] | None = None
    bytes: PositiveInt
    bits: PositiveInt
    perplexity: dict[str, EstimateDocument]
    speed: dict[str, FiniteFloat] | None = None
    fronts: list[str]


class _SweepDocument(BaseModel):
    what: Literal["sweep"]
    texts: dict[str, str]
    costs: list[Literal["bytes", "speed"]]
    points: list[_SweepPointDocument] = Field(min_length=1)


def read_evaluation(file: Path) -> EvaluationDocument:
    """Return the document in a file that ``neuronmm evaluate --json`` printed.

    Raises:
        UserError: it is not such a document.
    """
    document = _checked(file, EvaluationDocument.model_validate, _read(file), "evaluate --json")
    if any(set(row.models) != set(document.models) for row in document.results):
        raise UserError(f"{file}: a measure lacks a model; give a file that evaluate --json printed")
    return document


def read_benchmark(file: Path) -> BenchmarkResult:
    """Return the document in a file that ``neuronmm benchmark --json`` printed for a CPU or a GPU.

    Raises:
        UserError: it is not such a document.
    """
    document = _read(file)
    probe = document.get("read_bandwidth")
    values = {
        **document,
        "compression": None,
        "probe_bytes": probe.get("buffer_bytes") if isinstance(probe, dict) else 0,
    }
    result = _checked(file, TypeAdapter(BenchmarkResult).validate_python, values, "benchmark --json")
    for point in result.points:
        times = [entry for figures in point.variants.values() for entry in (figures.ttft, figures.tpot)]
        limits = [figures.limit_tokens_per_second for figures in point.variants.values()]
        numbers = [value for time in times for value in (time.median, time.min, time.max)] + limits
        if not numbers or point.variants.keys() != result.variants.keys() or not all(0 < n < 1e12 for n in numbers):
            raise UserError(f"{file}: a point lacks a variant or a time; give a file that benchmark --json printed")
    return result


def read_sweep(folder: Path) -> tuple[list[SweepPoint], list[str], list[str]]:
    """Return the points of a sweep's folder, its costs and the names of its texts.

    Raises:
        UserError: there is no sweep, or it has no dense model to compare with.
    """
    file = folder / "sweep.json"
    document = _checked(file, _SweepDocument.model_validate, _read(file), "sweep")
    texts = list(document.texts)
    for point in document.points:
        if any(entry.value <= 0 for entry in point.perplexity.values()) or (
            point.speed is not None and not point.speed.get("tokens_per_second", 0) > 0
        ):
            raise UserError(f"{file}: the point {point.name} has no positive perplexity or speed; sweep again")
        for cost, text in itertools.product(document.costs, texts):
            without = text not in point.perplexity or (cost == "speed" and point.speed is None)
            if without and f"{cost}, {text}" in point.fronts:
                raise UserError(f"{file}: the point {point.name} is in a front without its figures; sweep again")
    points = [cast(SweepPoint, point.model_dump(exclude_none=True)) for point in document.points]
    dense = [point for point in points if point["name"] == "dense"]
    if not dense or not set(texts) <= dense[0]["perplexity"].keys():
        raise UserError(f"{file}: has no dense model with every text; resume the sweep")
    for known in points:
        for entry in known["perplexity"].values():
            entry.setdefault("standard_error", None)
    return points, list(document.costs), texts


def _read(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``, whose numbers all fit a float.

    Raises:
        UserError: it is no JSON object, or holds an integer of more than 64 bits.
    """
    document = read_object(file)
    values: list[Any] = [document]
    while values:
        value = values.pop()
        if isinstance(value, (dict, list)):
            values += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and abs(value) >= 1 << 63:
            raise UserError(f"{file}: holds a number of more than 64 bits; no command writes one")
    return document


def _checked(file: Path, check: Callable[[Any], T], document: dict[str, Any], command: str) -> T:
    try:
        return check(document)
    except ValidationError as error:
        field, problem, _ = first_problem(error)
        raise UserError(f"{file}: {field}{problem}; give what neuronmm {command} writes") from None
