"""The Neuron backend: transformers-neuronx on a Trainium machine."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import NoReturn

import torch

from neuronmm.models.errors import UserError

_WAY_OUT = (
    "install the Neuron SDK's transformers-neuronx on a Trainium instance: "
    "pip install transformers-neuronx --extra-index-url https://pip.repos.neuron.amazonaws.com; "
    "elsewhere use --backend cpu"
)


def missing() -> str | None:
    """None when transformers-neuronx can be used.

    PyPI carries empty packages under the SDK's names, some of which import without an error: only a class that the
    real one has proves that it is there.
    """
    try:
        import_module("transformers_neuronx").LlamaForSampling  # noqa: B018
    except (ImportError, AttributeError, RuntimeError):
        return f"transformers-neuronx is not present; {_WAY_OUT}"
    return None


def load(folder: Path, dtype: torch.dtype, impl: str) -> NoReturn:
    """Not available in this version.

    Raises:
        UserError: always.
    """
    raise UserError("this version of neuronmm cannot load a model into transformers-neuronx yet; use --backend cpu")
