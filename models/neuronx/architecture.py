"""Read the dimensions that a graph needs from config.json, and refuse models that the hosts cannot run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuronmm.models.errors import UserError
from neuronmm.models.model_config import ModelConfig
from neuronmm.models.portable import portable_config

ROPE_TYPES = ("default", "llama3")
"""The rotary position encodings that both hosts implement."""


@dataclass(frozen=True)
class Architecture:
    """Dimensions and constants of a Llama-style decoder.

    ``head``: size of a head. ``linears``: :attr:`.ModelConfig.linears`. ``positions``: longest context.
    ``rope_scaling``: config.json's block of that name, or None. ``ends``: end-of-sequence tokens.
    """

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    linears: dict[str, tuple[int, int]]
    vocabulary: int
    positions: int
    epsilon: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    ends: tuple[int, ...]

    @classmethod
    def of(cls, config: dict[str, Any], where: str) -> Architecture:
        """Parse the content of config.json; ``where`` names it in errors.

        Raises:
            UserError: the family is not supported, an entry is missing or invalid, or the hosts cannot run the model.
        """
        sizes, config = ModelConfig.parse(config, where), portable_config(config)
        scaling = config.get("rope_scaling") or None
        kind = scaling and scaling.get("rope_type", scaling.get("type", "default"))
        if scaling and kind not in ROPE_TYPES:
            raise UserError(f"{where}: the Neuron hosts have no rope scaling {kind!r}, only {', '.join(ROPE_TYPES)}")
        ends, positions, epsilon = sizes.eos_token_id, sizes.max_position_embeddings, sizes.rms_norm_eps
        if positions is None or epsilon is None:
            raise UserError(f"{where}: max_position_embeddings or rms_norm_eps is missing; download it again")
        architecture = cls(
            model_type=sizes.model_type,
            hidden=sizes.hidden_size,
            intermediate=sizes.intermediate_size,
            layers=sizes.num_hidden_layers,
            heads=sizes.num_attention_heads,
            kv_heads=sizes.kv_heads,
            head=sizes.head,
            linears=sizes.linears,
            vocabulary=sizes.vocab_size,
            positions=positions,
            epsilon=epsilon,
            rope_theta=float(config.get("rope_theta") or 10000.0),
            rope_scaling=scaling if kind != "default" else None,
            ends=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        )
        hidden, head = architecture.hidden, architecture.head
        if hidden % head:
            # The hosts compute the head size as hidden size / heads, so some number of heads must give it.
            raise UserError(f"{where}: hidden size {hidden} is not a multiple of the head size {head}")
        return architecture

    @property
    def host_heads(self) -> int:
        """The number of heads passed to a host, chosen so that its hidden size / heads is the head size."""
        return self.hidden // self.head
