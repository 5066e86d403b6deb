"""The ``quantization_config`` block of config.json, which describes a compressed checkpoint."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from neuronmm.models.errors import UserError, first_problem
from neuronmm.models.families import same_input

QUANT_METHOD = "neuronmm"
FORMAT: Final = 1


class CompressionSpec(BaseModel):
    """Which linears are factorised, and the settings of the compression.

    ``ranks`` maps the full name of each factorised linear to its rank; all other linears are dense. ``shared`` maps a
    factorised linear to its leader, whose A it uses. ``factors`` is the precision of the stored factors: the model's,
    or int8 with one float32 scale per row. Ratios are the fraction of the targeted linears' weights that is removed,
    0 to 1; ``model_ratio`` is the fraction of all parameters. Every rank is a multiple of ``align``.
    """

    model_config = ConfigDict(extra="forbid")

    quant_method: Literal["neuronmm"] = "neuronmm"
    format: Literal[1] = FORMAT
    ranks: dict[str, PositiveInt] = Field(min_length=1)
    shared: dict[str, str] = {}
    factors: Literal["model", "int8"] = "model"
    method: str
    targets: str
    asked_ratio: FiniteFloat
    realised_ratio: FiniteFloat
    model_ratio: FiniteFloat
    align: PositiveInt
    calibration: dict[str, Any] | None = None
    version: str

    @field_validator("shared")
    @classmethod
    def _shares_what_fits(cls, shared: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        ranks = info.data.get("ranks", {})  # empty if the ranks are invalid, which has its own message
        for name, leader in shared.items() if ranks else ():
            for needed in (name, leader):
                if needed not in ranks:
                    raise ValueError(f"{needed} has no rank")
            if leader in shared:
                raise ValueError(f"{name} uses the A of {leader}, which has no A")
            if not same_input(name, leader):
                raise ValueError(f"{name} does not read the input of {leader}")
            if ranks[name] != ranks[leader]:
                raise ValueError(f"{name} has rank {ranks[name]}, but its leader {leader} has rank {ranks[leader]}")
        return shared

    @classmethod
    def parse(cls, block: Any, where: str) -> CompressionSpec:
        """Validate a ``quantization_config`` block read from JSON.

        Raises:
            UserError: the block belongs to another method, its format is unknown to this version, or a field is
                missing, unknown or malformed.
        """
        if not isinstance(block, dict):
            raise UserError(f"{where}: quantization_config is not a JSON object; compress the model again")
        method = block.get("quant_method", QUANT_METHOD)
        if method != QUANT_METHOD:
            raise UserError(f"{where}: the weights are quantised by {method!r}; use the original checkpoint")
        if block.get("format", FORMAT) != FORMAT:
            raise UserError(
                f"{where}: checkpoint format {block['format']} is not format {FORMAT}, the one this neuronmm reads; "
                "install the version that wrote it"
            )
        try:
            return cls.model_validate(block)
        except ValidationError as error:
            field, problem, _ = first_problem(error)
            raise UserError(f"{where}: quantization_config.{field}{problem}; compress the model again") from None
