"""The tensors of a GGUF file under the names of transformers, and the sizes of its model, without torch."""

from __future__ import annotations

from pathlib import Path

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

from neuronmm.models.errors import UserError
from neuronmm.models.gguf_header import Header, StoredTensor
from neuronmm.models.model_config import ModelConfig
from neuronmm.models.tensors import EMBEDDING, promised

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of a GGUF file that scales the frequencies of RoPE; transformers has an entry of config.json instead."""


def sizes_of(file: Path, header: Header) -> ModelConfig:
    """Return the sizes of the model in a GGUF file.

    Raises:
        UserError: the family is not supported, or a size is missing or out of range.
    """
    values = {"model_type": header.architecture, **header.sizes}
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{file}: token_embd.weight ({EMBEDDING}) is not in this GGUF file; download it again")
    values |= {"vocab_size": embedding.shape[0], "tie_word_embeddings": "output.weight" not in header.tensors}
    config = ModelConfig.parse(values | biases(header), str(file))
    if header.rotated not in (None, config.head):
        raise UserError(
            f"{file}: RoPE turns {header.rotated} of the {config.head} features of a head; it has to turn all"
        )
    return config


def biases(header: Header) -> dict[str, bool]:
    """Return the entries of config.json that say which linears have a bias; a GGUF file just has the tensors."""
    if header.architecture == "qwen2":  # the family says it
        return {}
    parts = {"attention_bias": "attn_q", "mlp_bias": "ffn_gate"}
    return {entry: True for entry, part in parts.items() if f"blk.0.{part}.bias" in header.tensors}


def gguf_names(file: Path, stored: dict[str, StoredTensor], config: ModelConfig) -> dict[str, str]:
    """Map the name of every tensor of the model to its name in the GGUF file.

    Raises:
        UserError: the file lacks a tensor, or has one of another shape or one that belongs to no part of the model.
    """
    (arch,) = (arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == config.model_type)
    names, found = get_tensor_name_map(arch, config.num_hidden_layers), {}
    unused = set(stored) - {ROPE_FACTORS}
    for name, promise in promised(config, None):
        gguf_name = str(names.get_name(name, try_suffixes=(".weight", ".bias")))
        if gguf_name not in stored:
            if promise.required and name.endswith(".bias") and config.model_type != "qwen2":
                raise UserError(f"{file}: only some linears have biases, {gguf_name} is not there; it is not supported")
            if promise.required:
                raise UserError(f"{file}: {gguf_name} ({name}) is not in this GGUF file; download it again")
            continue
        shape = stored[gguf_name].shape
        if shape != promise.shape:
            raise UserError(
                f"{file}: {gguf_name} has shape {list(shape)}, not {list(promise.shape)}; download it again"
            )
        found[name] = gguf_name
        unused.discard(gguf_name)
    if unused:
        raise UserError(f"{file}: {min(unused)} belongs to no part of a {config.model_type} model; it is not supported")
    return found
