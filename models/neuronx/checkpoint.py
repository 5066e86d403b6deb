"""A checkpoint folder tensor by tensor: which linears are factorised, and their weights when they are wanted."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from neuronmm.kernels.int8 import Int8
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS
from neuronmm.models.load import inspect
from neuronmm.models.neuronx.architecture import Architecture
from neuronmm.models.tensors import EMBEDDING, HEAD, NORM, check_finite


class Checkpoint:
    """A dense or compressed checkpoint. Nothing but config.json and the shards' headers is read until a weight is.

    Raises:
        UserError: a corrupt or missing shard, a config.json that disagrees with the weights, or a model that the
            Neuron hosts cannot run.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        found = inspect(folder)
        self.folder, self.dtype = folder, dtype
        self.architecture = Architecture.of(found.settings, str(folder / "config.json"))
        self.ranks: dict[str, int] = dict(found.spec.ranks) if found.spec else {}
        self.shared: dict[str, str] = dict(found.spec.shared) if found.spec else {}
        self._files = found.files

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        """One tensor in the dtype of the build; an int8 factor dequantised, rounded to that dtype once.

        Raises:
            UserError: there is none of that name, or it holds NaN or infinity.
        """
        if name not in self._files:
            raise UserError(f"{self.folder}: config.json and weights disagree: {name} is in no shard")
        found = self._read(name)
        if found.dtype is torch.int8:
            return Int8(found, self._read(f"{name}_scale").float()).dequantise(self.dtype)
        return found.to(self.dtype)

    def _read(self, name: str) -> Tensor:
        """One tensor as it is stored, its numbers finite."""
        with safe_open(self._files[name], framework="pt") as tensors:
            found = tensors.get_tensor(name)
        check_finite(name, found, self.folder)
        return found

    def embedding(self) -> Tensor:
        """Dimensions: [vocabulary, hidden]."""
        return self.tensor(EMBEDDING)

    def final_norm(self) -> Tensor:
        """Dimensions: [hidden]."""
        return self.tensor(NORM)

    def output(self) -> Tensor:
        """The language model head; the embedding where the two are tied. Dimensions: [vocabulary, hidden]."""
        return self.tensor(HEAD if self.holds(HEAD) else EMBEDDING)


def layer_name(index: int, part: str) -> str:
    """Full name of a part of a decoder layer."""
    return f"{LAYERS}.{index}.{part}"
