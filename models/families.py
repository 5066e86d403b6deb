"""The supported model families, as data: no family has code of its own.

All families share one layout of the decoder layer. A family is its ``model_type``, its architecture class and the
names of its members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuronmm.models.errors import UserError


@dataclass(frozen=True)
class Family:
    """A transformers ``model_type`` that this project can compress and run."""

    model_type: str
    architecture: str
    members: str


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", "Llama 2, Llama 3.x, SmolLM2"),
        Family("qwen2", "Qwen2ForCausalLM", "Qwen2, Qwen2.5"),
        Family("qwen3", "Qwen3ForCausalLM", "Qwen3"),
    )
}

LAYERS = "model.layers"
"""The module path of the decoder layers in every supported architecture."""

LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Short name -> module path of each linear of a decoder layer."""

TARGETS: dict[str, tuple[str, ...]] = {
    "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
}
TARGETS["all"] = TARGETS["attention"] + TARGETS["mlp"]
"""Value of ``--targets`` -> module paths of the linears inside a decoder layer."""

STAGES: tuple[tuple[str, ...], ...] = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The linears of a decoder layer in execution order, grouped by input."""

SAME_INPUT = tuple(stage for stage in STAGES if len(stage) > 1)
"""The groups of linears that read the same input, and so may share one A."""


def same_input(one: str, other: str) -> bool:
    """Return whether two linears, given by full name, are in the same decoder layer and read the same input."""
    (layer, *path), (other_layer, *other_path) = (name.rsplit(".", 2) for name in (one, other))
    pair = {".".join(path), ".".join(other_path)}
    return layer == other_layer and any(pair <= set(group) for group in SAME_INPUT)


def family_of(config: dict[str, Any], where: str) -> Family:
    """Return the family of a config.json's content.

    Raises:
        UserError: the architecture is not supported, or uses a feature that the engine does not implement.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise UserError(f'{where}: architectures has to be a list of names, such as ["LlamaForCausalLM"]')
    if family is None or (architectures and family.architecture not in architectures):
        supported = "; ".join(f"{f.architecture} ({f.members})" for f in FAMILIES.values())
        architecture = ", ".join([f"model_type {model_type!r}", *(f"architecture {name}" for name in architectures)])
        raise UserError(f"{where}: {architecture} is not supported; supported are {supported}")
    if config.get("use_sliding_window"):
        raise UserError(f"{where}: sliding-window attention (use_sliding_window) is not supported; set it to false")
    if family.model_type == "llama":  # in the others use_sliding_window says it
        for entry in ("sliding_window", "attention_chunk_size"):
            if _hides(config, entry):
                raise UserError(f"{where}: sliding-window attention ({entry}) is not supported; set it to null")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: the MLP activation is {config['hidden_act']!r}; only silu (SwiGLU) is supported")
    return family


def _hides(config: dict[str, Any], entry: str) -> bool:
    """Return whether a window is smaller than the context; transformers' cache obeys it unless layers have types."""
    window, positions = config.get(entry), config.get("max_position_embeddings")
    if window is None or config.get("layer_types"):
        return False
    return not (isinstance(window, int) and isinstance(positions, int) and window >= positions)
