"""The ``quantization_config`` block of config.json, which describes a compressed checkpoint."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
)

from neuronmm.kernels import Form
from neuronmm.models.errors import UserError, first_problem
from neuronmm.models.families import same_input

QUANT_METHOD = "neuronmm"
FORMATS: Final = (1, 2, 3)
"""The checkpoint formats that this version reads. 1 has two factors for every linear; 2 adds pivoted forms; 3 adds
weights of few bits for what is not factorised, which may be all linears."""


class PivotedForm(BaseModel):
    """The form of one linear that is not stored as two factors, as in :class:`neuronmm.kernels.LowRank`.

    In the form ``rows``, the pivots are the ``rank`` outputs from ``first`` on; if ``first`` is None, the tensor
    ``<linear>.pivots`` [rank], int32, holds their numbers in increasing order. In the form ``columns``, they are the
    last inputs, and ``first`` is None.
    """

    model_config = ConfigDict(extra="forbid")

    form: Literal["rows", "columns"]
    first: NonNegativeInt | None = None

    @property
    def indexed(self) -> bool:
        """Whether a tensor holds the pivots."""
        return self.form == "rows" and self.first is None


def bias_name(linear: str, form: Form) -> str:
    """Return the name of the bias of a factorised linear: in the row form, B has no rows for the pivots."""
    return f"{linear}.bias" if form is Form.ROWS else f"{linear}.B.bias"


class CompressionSpec(BaseModel):
    """Which linears are factorised, and the settings of the compression.

    ``ranks`` maps the full name of each factorised linear to its rank; all other linears are dense. ``shared`` maps a
    factorised linear to its leader, whose A it uses. ``forms`` names the linears that are not stored as two factors;
    they need format 2. ``factors`` is the precision of the stored factors: the model's, int8 or fp8 with one float32
    scale per row, or :class:`neuronmm.kernels.Int4`, which needs format 3 and two factors. ``weights`` is that of all
    other linears, and of embedding and head, which are int8 even beside int4; it needs format 3, and then no linear has
    to be factorised. Ratios are the fraction of the targeted linears' weights that is removed, 0 to 1; ``model_ratio``
    is the fraction of all parameters. Every rank is a multiple of ``align``.
    """

    model_config = ConfigDict(extra="forbid")

    quant_method: Literal["neuronmm"] = "neuronmm"
    format: Literal[1, 2, 3] = 1
    weights: Literal["model", "int8", "int4"] = "model"
    ranks: dict[str, PositiveInt]
    shared: dict[str, str] = {}
    forms: dict[str, PivotedForm] = {}
    factors: Literal["model", "int8", "int4", "fp8"] = "model"
    method: str
    targets: str
    asked_ratio: FiniteFloat
    realised_ratio: FiniteFloat
    model_ratio: FiniteFloat
    align: PositiveInt
    calibration: dict[str, Any] | None = None
    version: str

    @field_validator("weights")
    @classmethod
    def _weights_fit(cls, weights: str, info: ValidationInfo) -> str:
        if weights != "model" and info.data.get("format") != 3:
            raise ValueError(f"{weights} needs format 3")
        return weights

    @field_validator("ranks")
    @classmethod
    def _has_ranks(cls, ranks: dict[str, int], info: ValidationInfo) -> dict[str, int]:
        if not ranks and info.data.get("format") != 3:
            raise ValueError("no linear is factorised, which needs format 3")
        return ranks

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

    @field_validator("forms")
    @classmethod
    def _forms_fit(cls, forms: dict[str, PivotedForm], info: ValidationInfo) -> dict[str, PivotedForm]:
        ranks, shared = info.data.get("ranks", {}), info.data.get("shared", {})
        if forms and info.data.get("format") == 1:
            raise ValueError("pivoted forms need format 2")
        for name, entry in forms.items() if ranks else ():
            if name not in ranks:
                raise ValueError(f"{name} has no rank")
            if name in shared:
                raise ValueError(f"{name} uses the A of {shared[name]}, so it has no pivots")
            if entry.form == "columns" and (entry.first is not None or name in shared.values()):
                raise ValueError(f"{name} has the form columns, which has no first pivot and shares no A")
        return forms

    @field_validator("factors")
    @classmethod
    def _factors_fit(cls, factors: str, info: ValidationInfo) -> str:
        if factors == "int4" and (info.data.get("format") != 3 or info.data.get("forms")):
            raise ValueError("int4 needs format 3, and no pivoted forms")
        return factors

    @property
    def few_bits(self) -> str | None:
        """What is stored in few bits that only the CPU and torch can run, in words; None if nothing is."""
        if self.weights != "model":
            return f"its dense weights are stored in {self.weights}"
        return "its factors are stored in int4" if self.factors == "int4" else None

    def form_of(self, linear: str) -> Form:
        """Return the form in which a factorised linear is stored."""
        return Form(self.forms[linear].form) if linear in self.forms else Form.TWO

    def check_first_pivot(self, linear: str, outputs: int) -> None:
        """Check that the range of pivots of a factorised linear lies within its ``outputs``.

        Raises:
            UserError: it does not.
        """
        first = self.forms[linear].first if linear in self.forms else None
        if first is not None and first + self.ranks[linear] > outputs:
            raise UserError(
                f"{linear!r} has {outputs} outputs, so its first pivot cannot be {first}; config.json is wrong"
            )

    @model_serializer(mode="wrap")
    def _without_later_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write formats 1 and 2 as the versions that only know these read them."""
        block = handler(self)
        if not self.forms:
            block.pop("forms", None)
        if self.weights == "model":
            block.pop("weights", None)
        return block

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
        if not {"quant_method", "ranks"} & block.keys():  # as old versions of bitsandbytes' integration wrote it
            raise UserError(f"{where}: the quantization_config is another program's; use the original checkpoint")
        if block.get("format", 1) not in FORMATS:
            raise UserError(
                f"{where}: checkpoint format {block['format']} is none of {FORMATS}, which this neuronmm reads; "
                "install the version that wrote it"
            )
        try:
            return cls.model_validate(block)
        except ValidationError as error:
            field, problem, _ = first_problem(error)
            raise UserError(f"{where}: quantization_config.{field}{problem}; compress the model again") from None
