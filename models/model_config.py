"""The entries of config.json that this project uses, checked before anything is built from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from neuronmm.models.errors import UserError, first_problem
from neuronmm.models.families import family_of

# Far above every published model. The limits keep `predict`, which reads no weights, from running for hours.
Width = Annotated[int, Field(ge=1, le=1 << 20)]
Layers = Annotated[int, Field(ge=1, le=1 << 12)]
Count = Annotated[int, Field(ge=1, le=1 << 24)]
MOST_POSITIONS = 1 << 31
Positions = Annotated[int, Field(ge=1, le=MOST_POSITIONS)]
Labels = Annotated[int, Field(ge=0, le=1 << 16)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[float, Field(ge=1, le=1)]  # no supported family rotates only a part of a head

_HEAD = {"qwen3": 128}
"""Family -> features per head where config.json does not say, as in transformers; else the hidden size per head."""

_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}
"""RoPE type -> the entries that it needs."""


class Rope(BaseModel):
    """The block ``rope_scaling`` of older config.json files, ``rope_parameters`` of newer ones."""

    model_config = ConfigDict(strict=True)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Whole | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Positions | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None

    @model_validator(mode="after")
    def _is_computable(self) -> Rope:
        kind = self.rope_type or self.type or "default"
        if kind not in _ROPE_NEEDS:  # a newer transformers may have more; it is slow to import
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            if kind not in ROPE_INIT_FUNCTIONS:
                known = sorted({*_ROPE_NEEDS, *ROPE_INIT_FUNCTIONS})
                raise ValueError(f"the RoPE type {kind!r} is not among {', '.join(known)}")
        for name in _ROPE_NEEDS.get(kind, ()):
            if getattr(self, name) is None:
                raise ValueError(f"RoPE of type {kind!r} needs {name}")
        if kind == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise ValueError("low_freq_factor and high_freq_factor are equal")
        return self

    def check_factors(self, head: int) -> None:
        """Check that longrope has a factor for each of its frequencies.

        Raises:
            ValueError: it has not.
        """
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != head // 2:
                raise ValueError(f"{name} has {len(factors)} numbers; a head of {head} has {head // 2} frequencies")


class ModelConfig(BaseModel):
    """A decoder's sizes, and the other entries that decide how it is built and run."""

    model_config = ConfigDict(strict=True)

    model_type: str
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    vocab_size: Count
    max_position_embeddings: Positions | None = None
    original_max_position_embeddings: Positions | None = None  # replaces the one in the block of RoPE's parameters
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] | None = None
    tie_word_embeddings: bool = False
    layer_types: list[Literal["full_attention"]] | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    pad_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Whole | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    num_labels: Labels | None = None  # unused here, but transformers creates a name for each
    per_layer_config: None = None  # would give single layers another attention
    transformers_weights: None = None  # would name another file, which transformers reads unchecked

    @model_validator(mode="after")
    def _fits_together(self) -> ModelConfig:
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(f"{self.num_attention_heads} attention heads are no multiple of {self.kv_heads} KV heads")
        if not (self.head_dim or self.model_type in _HEAD) and self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden size {self.hidden_size} is no multiple of {self.num_attention_heads} heads")
        if self.head % 2:
            raise ValueError(f"the head size {self.head} is odd; RoPE needs an even one")
        for rope in filter(None, (self.rope_scaling, self.rope_parameters)):
            rope.check_factors(self.head)
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} is not in the vocabulary of {self.vocab_size}")
        return self

    @property
    def kv_heads(self) -> int:
        """Number of KV heads; less than the number of attention heads with grouped-query attention."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head(self) -> int:
        """Features per head."""
        return self.head_dim or _HEAD.get(self.model_type) or self.hidden_size // self.num_attention_heads

    def has_bias(self, linear: str) -> bool:
        """Return whether the linear of this short name has a bias, which the family or config.json says."""
        if linear in ("gate", "up", "down"):
            return self.model_type == "llama" and bool(self.mlp_bias)
        if self.model_type == "qwen2":
            return linear != "o"
        return bool(self.attention_bias)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The shapes [out, in] of the weights of a decoder layer's linears, by short name."""
        hidden, wide = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head, self.kv_heads * self.head
        return {
            "q": (queries, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "o": (hidden, queries),
            "gate": (wide, hidden),
            "up": (wide, hidden),
            "down": (hidden, wide),
        }

    @classmethod
    def parse(cls, config: dict[str, Any], where: str) -> ModelConfig:
        """Check the content of a config.json.

        Raises:
            UserError: the family is not supported, or an entry is missing, of another type, or out of range.
        """
        family_of(config, where)
        try:
            return cls.model_validate(config)
        except ValidationError as error:
            field, problem, value = first_problem(error)
            actual = f" (it is {value})" if value else ""
            raise UserError(f"{where}: {field}{problem}{actual}; fix it or download it again") from None
