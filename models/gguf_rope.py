"""The RoPE scaling of a GGUF file, which transformers does not read, as an entry of config.json.

Llama 3.x has a tensor of factors. Other models name a scaling in the header, with the parameters of llama.cpp; those of
``linear`` and of ``yarn`` with its default parameters are those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from neuronmm.models.errors import UserError
from neuronmm.models.gguf_names import ROPE_FACTORS

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The parameters that all models of type ``llama3`` share, and that a GGUF file therefore omits."""

_TYPE, _FACTOR, _ORIGINAL = "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"
_OLD_LINEAR = "rope.scale_linear"
_UNUSED = {"rope.scaling.finetuned"}  # says how the model was trained, and changes no frequency


def with_scaling(
    config: type[PretrainedConfig],
    values: dict[str, Any],
    entries: Mapping[str, str | float],
    factors: Tensor | None,
    where: str,
) -> PretrainedConfig:
    """Return the configuration of class ``config`` with ``values`` and with the RoPE scaling of the file.

    Args:
        config: the class of the configuration.
        values: its entries; the RoPE scaling is added to them.
        entries: those of the header whose names begin with ``rope.scal``, without the architecture.
        factors: the numbers by which the frequencies are divided, float32 [head / 2], or None.
        where: the file.

    Raises:
        UserError: the scaling is of an unknown kind.
    """
    rope = _named(entries, where)
    if factors is not None:
        if rope:
            raise UserError(f"{where}: {ROPE_FACTORS} and the header each have a RoPE scaling; not supported")
        rope = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    if rope and "rope_parameters" in values:
        values["rope_parameters"] |= rope
    elif rope:
        values["rope_scaling"] = rope
    scaled = config.from_dict(values)
    if factors is not None:
        _check(scaled, factors, where)
    return scaled


def _named(entries: Mapping[str, str | float], where: str) -> dict[str, Any]:
    """Return the scaling that the header names, empty if it names none."""
    left = {name: value for name, value in entries.items() if name not in _UNUSED}
    kind, old = left.pop(_TYPE, "linear"), left.pop(_OLD_LINEAR, 1.0)
    factor, original = left.pop(_FACTOR, old), left.pop(_ORIGINAL, None)
    known = kind in ("none", "linear") or (kind == "yarn" and isinstance(original, int) and original > 0)
    if left or not known or isinstance(factor, str) or not 0 <= factor < math.inf:
        raise UserError(f"{where}: the header has a RoPE scaling that is not supported: {dict(entries)}")
    if kind == "none" or factor in (0, 1):  # llama.cpp scales nothing then
        return {}
    of_yarn = {"original_max_position_embeddings": original} if kind == "yarn" else {}
    return {"rope_type": kind, "factor": float(factor), **of_yarn}


def _check(scaled: PretrainedConfig, factors: Tensor, where: str) -> None:
    """Check that the frequencies of the configuration ``scaled`` are those of the file.

    Raises:
        UserError: they are not.
    """
    theta = (getattr(scaled, "rope_parameters", None) or vars(scaled))["rope_theta"]
    exponents = torch.arange(0, len(factors)) / len(factors)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    if frequencies.shape != factors.shape or not torch.allclose(frequencies, theta**-exponents / factors, rtol=1e-3):
        raise UserError(f"{where}: {ROPE_FACTORS} holds a RoPE scaling other than that of Llama 3.x; not supported")
