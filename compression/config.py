"""The settings of a compression run, from the command line, a recipe file or keyword arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from neuronmm.compression.ranks import MAX_RATIO, MIN_RATIO, Align
from neuronmm.compression.shipped_texts import CODE, PROSE, SHIPPED
from neuronmm.models.errors import UserError, first_problem, reading

SELF = "self"
"""The calibration text that the model samples itself."""

USUAL_TEXTS = (PROSE, CODE, SELF)
"""The calibration texts of a run that names none."""

BARE: dict[str, Any] = {
    "method": "whitened",
    "allocation": "uniform",
    "share_a": "off",
    "refine": "off",
    "form": "two",
}
"""The settings of a published method, SVD-LLM's unless another is given, without what ``compress`` adds by default."""

RENAMED = {"share": "share_a", "factors": "factor_dtype"}
"""Old name of a setting -> its name. Recipes, keyword arguments, options and reports may still have the old ones."""

BUDGETS = {"faithful": 0.05, "balanced": 0.1}
"""Name -> budget in nats per token. docs/results/quality.md has what models at these distances write."""

_MAX_RECIPE_BYTES = 1 << 16

P = ParamSpec("P")
T = TypeVar("T")


def renamed(settings: Mapping[str, Any], *, notice: bool = True) -> dict[str, Any]:
    """Return ``settings`` with every old name replaced; with ``notice``, say so on stderr, once per name.

    Raises:
        UserError: a setting is given by its old and its new name.
    """
    for old, new in RENAMED.items():
        if old in settings and new in settings:
            raise UserError(f"{old}, {new}: are the same setting; give {new} alone")
        if old in settings and notice:
            _note_renamed(old, new)
    return {RENAMED.get(name, name): value for name, value in settings.items()}


@cache
def _note_renamed(old: str, new: str) -> None:
    print(f"neuronmm: the setting {old} is now named {new}; the old name still works", file=sys.stderr)


def accepts_old_names(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function take settings by their old names as keyword arguments."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **renamed(kwargs))  # type: ignore[arg-type]

    return call


@dataclass(frozen=True)
class Rows:
    """The size of the calibration text: ``count`` rows of ``length`` tokens each, and the seed of their choice."""

    count: int
    length: int
    seed: int


class CompressionConfig(BaseModel):
    """The settings of one run; a recipe YAML has these names.

    ``ratio`` is the fraction of the targeted linears' parameters to remove; with 0 no linear is factorised. With
    ``budget``, the largest KL divergence from the dense model in nats per token or a name of :data:`BUDGETS`, it is
    found by measurement; ``ratio`` is then where the search starts.
    ``factor_dtype`` and ``weight_dtype`` are those in which the factors and all other weights are stored at the end.
    ``calibration`` is ``self``, ``prose``, ``code``, a file, or a list of these, which get equal shares of the
    ``calibration_rows`` rows of ``calibration_length`` tokens. ``damping`` is relative to the mean diagonal entry of
    the Gram matrix, and at least 1e-10, so that rounding errors stay below it. ``seed`` is below 2**32.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ratio: float = Field(default=0.15, ge=0, le=MAX_RATIO)
    budget: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    targets: Literal["mlp", "attention", "all"] = "all"
    method: Literal["svd", "asvd", "whitened", "fisher", "anchored"] = "fisher"
    allocation: Literal["uniform", "global"] = "global"
    share_a: Literal["off", "auto"] = "auto"
    refine: Literal["off", "fast", "full"] = "fast"
    recover: Literal["off", "lora", "factors"] = "off"
    form: Literal["two", "pivoted"] = "pivoted"
    factor_dtype: Literal["model", "int8", "int4", "fp8"] = "model"
    weight_dtype: Literal["model", "int8", "int4"] = "model"
    align: Align = "auto"
    calibration: str | Annotated[list[str], Field(min_length=1)] = list(USUAL_TEXTS)
    calibration_rows: int = Field(default=128, ge=1)
    calibration_length: int = Field(default=256, ge=2)
    damping: float = Field(default=1e-4, ge=1e-10, le=1e6)
    seed: int = Field(default=0, ge=0, lt=2**32)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Replace old names. The baselines svd and asvd are as published by default.

        No setting is a boolean, which pydantic would take as the number 0 or 1.
        """
        values = renamed(values)
        for name, value in values.items():
            if isinstance(value, bool):
                raise ValueError(f"{name}: is the boolean {value}; give a number, or a word such as 'off' in quotes")
        texts = values.get("calibration")
        if texts == "" or (isinstance(texts, list) and "" in texts):
            raise ValueError("calibration: a name is empty; give a file, self, prose or code")
        if isinstance(texts, list):
            if len(set(map(str, texts))) < len(texts):
                raise ValueError(f"calibration {texts}: names one text twice")
            values["calibration"] = texts[0] if len(texts) == 1 else texts
        if values.get("method") in ("svd", "asvd"):
            values = {**BARE, **values}
        if values.get("budget") is None:
            return values
        if "ratio" in values:
            raise ValueError("budget and ratio exclude each other; give one of them")
        if values.get("method") == "anchored":
            raise ValueError("a budget needs a method whose ranks are nested, and anchored is not; use fisher")
        return {**values, "budget": _nats(values["budget"]), "ratio": MIN_RATIO}

    @model_validator(mode="after")
    def _removes_or_rounds(self) -> CompressionConfig:
        if 0 < self.ratio < MIN_RATIO:
            raise ValueError(f"ratio {self.ratio:g}: must be {MIN_RATIO} to {MAX_RATIO}, or 0 with a weight_dtype")
        if not self.factorises and self.weight_dtype == "model":
            raise ValueError("ratio 0: removes nothing and rounds nothing; give a weight_dtype or a higher ratio")
        if not self.factorises and (self.recover != "off" or self.factor_dtype != "model"):
            raise ValueError("ratio 0: leaves no factors to recover or to round; give a higher ratio")
        if self.recover != "off" and self.calibration_rows < 2:
            raise ValueError("calibration_rows 1: recovery trains on one row and is measured on another; give more")
        if self.factor_dtype == "int4" and self.form != "two":
            raise ValueError("factor_dtype int4: pivoted factors lose too much in 4 bits; use the form two")
        if self.factor_dtype == "fp8" and self.weight_dtype != "model":
            raise ValueError("factor_dtype fp8: is Trainium's, which runs no dense weights of few bits; leave one out")
        return self

    @property
    def factorises(self) -> bool:
        """Whether linears are factorised; if not, their weights are only rounded."""
        return self.ratio > 0

    @property
    def needs_format_3(self) -> bool:
        """Whether the checkpoint is of format 3 because of what is stored in few bits."""
        return self.weight_dtype != "model" or self.factor_dtype == "int4"

    @property
    def needs_text(self) -> bool:
        """Whether the run needs calibration text: always, except for plain SVD at uniform ranks without training."""
        if not self.factorises:
            return self.method != "svd"
        return self.method != "svd" or self.needs_spectra or self.refine != "off" or self.recover != "off"

    @property
    def needs_spectra(self) -> bool:
        """Whether the plan of the ranks depends on the calibration text."""
        planned = self.allocation == "global" or self.share_a == "auto" or self.budget is not None
        return planned and self.factorises

    @property
    def texts(self) -> list[str]:
        """The sources of the calibration text: files, ``self``, ``prose`` or ``code``."""
        return [self.calibration] if isinstance(self.calibration, str) else self.calibration

    @property
    def text_files(self) -> list[str]:
        """The files among :attr:`texts`."""
        return [text for text in self.texts if text not in (SELF, *SHIPPED)]

    @property
    def rows(self) -> Rows:
        """The size of the calibration text."""
        return Rows(self.calibration_rows, self.calibration_length, self.seed)

    @property
    def streams(self) -> tuple[str, ...]:
        """The models whose hidden states the closed form or the refinement reads: ``dense``, ``compressed``."""
        return ("dense", "compressed") if self.method == "anchored" or self.refine != "off" else ("dense",)

    @classmethod
    def build(
        cls, recipe: Path | None = None, *, usual: Mapping[str, Any] | None = None, **settings: Any
    ) -> CompressionConfig:
        """Return the settings of a recipe, overridden by every keyword argument that is not None.

        ``usual`` replaces the defaults of what neither of them names.

        Raises:
            UserError: the recipe is missing or not YAML, or a setting is unknown or out of range.
        """
        values = {} if recipe is None else renamed(_read_recipe(recipe))
        given = renamed({name: value for name, value in settings.items() if value is not None})
        for one, other in (("budget", "ratio"), ("ratio", "budget")):  # an option replaces either of a recipe
            if one in given and other not in given:
                values.pop(other, None)
        values = {**(usual or {}), **values, **given}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            field, problem, value = first_problem(error)
            name = field.partition(".")[0].removesuffix(": ")
            where = f"{recipe}: " if recipe is not None and name not in given else ""
            what = f"{name} = {value}: " if field else ""
            raise UserError(f"{where}{what}{problem[:1].lower()}{problem[1:]}") from None


def _nats(budget: Any) -> Any:
    """Return a budget in nats per token, given as a number or by name; pydantic checks other values."""
    try:
        return BUDGETS.get(budget) or float(budget) if isinstance(budget, str) else budget
    except ValueError:
        raise ValueError(f"budget {budget!r}: must be nats per token or one of {', '.join(BUDGETS)}") from None


class _Loader(yaml.SafeLoader):
    """YAML of UTF-8 text without references, a few of which can expand to more values than fit in memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("a recipe cannot contain references (*name)")
        return super().compose_node(parent, index)

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        value.encode("utf-8")  # an escape can encode half a surrogate pair, which no file can hold
        return value


def _read_recipe(path: Path) -> dict[Any, Any]:
    try:
        if path.stat().st_size > _MAX_RECIPE_BYTES:
            raise UserError(f"{path}: larger than {_MAX_RECIPE_BYTES >> 10} KB; a recipe is a few lines")
        with reading(f"{path}: not a readable recipe"):
            values = yaml.load(path.read_bytes().decode("utf-8"), Loader=_Loader)
    except OSError as error:
        raise UserError(f"{path}: not a readable recipe ({error.strerror})") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: a recipe is a YAML mapping such as 'ratio: 0.2'")
    return values
