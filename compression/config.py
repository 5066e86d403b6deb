"""What a compression run is asked to do: the command line, a recipe file, or keyword arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from neuronmm.compression.calibration import SELF, Rows
from neuronmm.compression.ranks import MAX_RATIO, MIN_RATIO
from neuronmm.models.errors import UserError

BARE: dict[str, Any] = {"allocation": "uniform", "share": "off", "refine": "off"}
"""What ``compress`` adds to a method by default, left out."""


class CompressionConfig(BaseModel):
    """One run's settings; a recipe YAML has these names.

    ``ratio`` is the share of the targeted linears' parameters to remove. ``calibration`` is ``self`` or a file of which
    ``calibration_rows`` rows of ``calibration_length`` tokens are used. ``damping`` is relative to the mean of the Gram
    matrix's diagonal.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ratio: float = Field(0.2, ge=MIN_RATIO, le=MAX_RATIO)
    targets: Literal["mlp", "attention", "all"] = "mlp"
    method: Literal["svd", "asvd", "whitened", "anchored"] = "whitened"
    allocation: Literal["uniform", "global"] = "global"
    share: Literal["off", "auto"] = "auto"
    refine: Literal["off", "fast", "full"] = "fast"
    recover: Literal["off", "lora", "factors"] = "off"
    factors: Literal["model", "int8"] = "model"
    align: Literal["auto"] | int = "auto"
    calibration: str = SELF
    calibration_rows: int = Field(128, ge=1)
    calibration_length: int = Field(256, ge=2)
    damping: float = Field(1e-4, gt=0)
    seed: int = 0

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
            try:
                values = yaml.safe_load(recipe.read_text(encoding="utf-8")) or {}
            except (OSError, yaml.YAMLError) as error:
                raise UserError(f"{recipe}: not a readable recipe ({str(error).splitlines()[0]})") from None
            if not isinstance(values, dict):
                raise UserError(f"{recipe}: a recipe is a YAML mapping such as 'ratio: 0.2'")
        values.update({name: value for name, value in settings.items() if value is not None})
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            where = f"{recipe}: " if recipe is not None else ""
            raise UserError(f"{where}{first['loc'][0]} = {first['input']!r}: {first['msg'].lower()}") from None
