"""What a compressed checkpoint says of itself: the ``quantization_config`` block of its config.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from neuronmm.models.errors import UserError

QUANT_METHOD = "neuronmm"
FORMAT = 1


class CompressionSpec(BaseModel):
    """Which linears are factorised and how they came to be.

    ``ranks`` maps the full name of each factorised linear to its rank; a linear that is not named is dense.
    Ratios are shares of the targeted linears' weights removed, 0 to 1; ``model_ratio`` is the share of all
    parameters. ``align`` is the tile, in ranks, that every rank is a multiple of.
    """

    model_config = ConfigDict(extra="forbid")

    quant_method: Literal["neuronmm"] = "neuronmm"
    format: Literal[1] = FORMAT
    ranks: dict[str, int] = Field(min_length=1)
    method: str
    targets: str
    asked_ratio: float
    realised_ratio: float
    model_ratio: float
    align: int
    calibration: dict[str, Any] | None = None
    version: str

    @classmethod
    def parse(cls, block: dict[str, Any], where: str) -> CompressionSpec:
        """Validate a ``quantization_config`` block.

        Raises:
            UserError: a field is missing, unknown or malformed, or the format is newer than this code.
        """
        if block.get("format", FORMAT) != FORMAT:
            raise UserError(
                f"{where}: checkpoint format {block['format']} is not format {FORMAT}, the one this neuronmm reads; "
                "install the version that wrote it"
            )
        try:
            return cls(**block)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{where}: quantization_config.{field}: {first['msg']}; compress the model again") from None
