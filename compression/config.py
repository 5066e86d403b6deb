"""What a compression run is asked to do: the command line, a recipe file, or keyword arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from neuronmm.compression.calibration import SELF, Rows
from neuronmm.compression.ranks import MAX_RATIO, MIN_RATIO
from neuronmm.models.errors import UserError, first_problem, reading

_MOST_BYTES = 1 << 16

BARE: dict[str, Any] = {"allocation": "uniform", "share": "off", "refine": "off"}
"""What ``compress`` adds to a method by default, left out."""


class CompressionConfig(BaseModel):
    """One run's settings; a recipe YAML has these names.

    ``ratio`` is the share of the targeted linears' parameters to remove. ``calibration`` is ``self`` or a file of which
    ``calibration_rows`` rows of ``calibration_length`` tokens are used. ``damping`` is relative to the mean of the Gram
    matrix's diagonal. ``seed`` is below 2**32.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ratio: float = Field(default=0.2, ge=MIN_RATIO, le=MAX_RATIO)
    targets: Literal["mlp", "attention", "all"] = "mlp"
    method: Literal["svd", "asvd", "whitened", "anchored"] = "whitened"
    allocation: Literal["uniform", "global"] = "global"
    share: Literal["off", "auto"] = "auto"
    refine: Literal["off", "fast", "full"] = "fast"
    recover: Literal["off", "lora", "factors"] = "off"
    factors: Literal["model", "int8"] = "model"
    align: Literal["auto"] | int = "auto"
    calibration: str = SELF
    calibration_rows: int = Field(default=128, ge=1)
    calibration_length: int = Field(default=256, ge=2)
    damping: float = Field(default=1e-4, gt=0, le=1e6)
    seed: int = Field(default=0, ge=0, lt=2**32)

    @model_validator(mode="before")
    @classmethod
    def _baselines_stand_alone(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Plain and scaled SVD are there to be compared with: nothing is added to them unasked."""
        if values.get("method") in ("svd", "asvd"):
            return {**BARE, **values}
        return values

    @property
    def needs_text(self) -> bool:
        """Whether anything is fitted to calibration text: all but plain SVD at uniform ranks."""
        fitted = (self.allocation == "global", self.share == "auto", self.refine != "off", self.recover != "off")
        return self.method != "svd" or any(fitted)

    @property
    def text_file(self) -> str | None:
        """The file that the calibration text is read from, None where the model writes it."""
        return None if self.calibration == SELF else self.calibration

    @property
    def rows(self) -> Rows:
        """How much calibration text."""
        return Rows(self.calibration_rows, self.calibration_length, self.seed)

    @property
    def streams(self) -> tuple[str, ...]:
        """Whose hidden states are followed through the layers."""
        return ("dense", "compressed") if self.method == "anchored" or self.refine != "off" else ("dense",)

    @classmethod
    def build(cls, recipe: Path | None = None, **settings: Any) -> CompressionConfig:
        """A recipe's settings, overridden by every keyword argument that is not None.

        Raises:
            UserError: the recipe is missing or not YAML, or a setting is unknown or out of range.
        """
        values: dict[str, Any] = {}
        if recipe is not None:
            values = _read_recipe(recipe)
        values.update({name: value for name, value in settings.items() if value is not None})
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            field, problem, value = first_problem(error)
            where = f"{recipe}: " if recipe is not None else ""
            raise UserError(
                f"{where}{field.partition('.')[0].removesuffix(': ')} = {value}: {problem.lower()}"
            ) from None


class _Loader(yaml.SafeLoader):
    """YAML of UTF-8 text without references: a few of those in each other make more values than a computer can hold."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("a recipe has no use for references (*name)")
        return super().compose_node(parent, index)

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        value.encode("utf-8")  # an escape can stand for half a surrogate pair, which no file can hold
        return value


def _read_recipe(path: Path) -> dict[Any, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"{path}: larger than {_MOST_BYTES >> 10} KB; a recipe is a few lines")
        with reading(f"{path}: not a readable recipe"):
            values = yaml.load(path.read_bytes().decode("utf-8"), Loader=_Loader)
    except OSError as error:
        raise UserError(f"{path}: not a readable recipe ({error.strerror})") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: a recipe is a YAML mapping such as 'ratio: 0.2'")
    return values
