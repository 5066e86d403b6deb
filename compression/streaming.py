"""Run a model layer by layer from disk, with the weights of one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from neuronmm.compression.memory import free_memory
from neuronmm.compression.reader import Reader
from neuronmm.kernels import Int8
from neuronmm.models.errors import UserError, reading
from neuronmm.models.families import LAYERS
from neuronmm.models.load import load_config, quiet
from neuronmm.models.patch import patch
from neuronmm.models.source import read_config
from neuronmm.models.spec import CompressionSpec
from neuronmm.models.tensors import EMBEDDING, HEAD, NORM, check_tokens

RESIDENT_BYTES = 1 << 30
"""A checkpoint up to this size stays in memory between passes; a larger one is read again for each pass."""

BATCH_TOKENS = 2048
"""Calibration tokens per forward pass of a layer."""

Rotary = tuple[Tensor, Tensor]
"""RoPE's cos and sin [1, length, head_dim]."""


@dataclass
class Streams:
    """The hidden states of the calibration rows, which are the inputs of the next layer.

    Dimensions: ``dense``, the hidden states of the dense model, and ``compressed``, those of the model compressed so
    far, are both [rows, length, hidden]. A stream that the run does not need has no rows.
    """

    dense: Tensor
    compressed: Tensor
    rotary: Rotary

    def states(self) -> dict[str, Tensor]:
        """Return the streams that have rows, by name."""
        streams = {"dense": self.dense, "compressed": self.compressed}
        return {name: hidden for name, hidden in streams.items() if len(hidden)}


class StreamedModel:
    """The decoder layers, embedding and head of a checkpoint, dense or compressed, loaded one at a time.

    The modules are those of transformers and, in a compressed checkpoint, of :mod:`neuronmm.models`, built without
    weights. Each layer's tensors are loaded in turn, in ``dtype``, on ``device``. Without a dtype it is the
    checkpoint's, with bf16 instead of fp16, which overflows.

    Raises:
        UserError: unsupported architecture, or tensors that do not fit config.json.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None, device: str = "cpu") -> None:
        self.config = load_config(folder)
        self.reader = Reader(folder)
        stored = self.reader[NORM].dtype
        self.dtype = dtype or (torch.bfloat16 if stored is torch.float16 else stored)
        self.device = torch.device(device)
        with quiet(), reading(f"{folder / 'config.json'}: transformers cannot build this model"):
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(self.config, attn_implementation="sdpa").eval()
            # The rotary frequencies are computed, not loaded, so that module is built with memory.
            self._rotary = type(skeleton.model.rotary_emb)(config=self.config).to(self.device)
        block = read_config(folder).get("quantization_config")
        if block is not None:
            patch(skeleton, CompressionSpec.parse(block, str(folder / "config.json")))
        self._layers: nn.ModuleList = skeleton.model.layers
        self._norm = skeleton.model.norm
        self._resident = self._stays()

    def __len__(self) -> int:
        return len(self._layers)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [rows, length, hidden] of ``tokens`` [rows, length].

        Raises:
            UserError: a token is outside the vocabulary.
        """
        table = self.reader[EMBEDDING]
        check_tokens(tokens, len(table))
        rows = nn.functional.embedding(tokens, table)
        if table.dtype is torch.int8:
            rows = rows * self.reader[f"{EMBEDDING}_scale"][tokens][..., None]
        return rows.to(self.device, self.dtype)

    def rotary(self, hidden: Tensor, positions: Tensor) -> Rotary:
        """Return RoPE's cos and sin [1, length, head_dim] for ``positions`` [1, length]."""
        return self._rotary(hidden, positions.to(self.device))

    def streams(self, tokens: Tensor, names: tuple[str, ...], saved: dict[str, Tensor] | None = None) -> Streams:
        """Return the streams ``names`` of ``tokens`` [rows, length]: ``saved`` ones, or the inputs of the first layer.

        The other streams have no rows.
        """
        if saved is None:
            saved = dict.fromkeys(names, self.embed(tokens)) if names else {}
        absent = torch.empty(0, tokens.shape[1], self.config.hidden_size, device=self.device, dtype=self.dtype)
        hidden = {name: saved[name].to(self.device) for name in names}
        rotary = self.rotary(absent, torch.arange(tokens.shape[1])[None])
        return Streams(hidden.get("dense", absent), hidden.get("compressed", absent), rotary)

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Load the final norm and the head for the duration of the block: [rows, hidden] -> [rows, vocab], float32."""
        tied = self.config.tie_word_embeddings
        name = EMBEDDING if tied else HEAD
        weight = self._weight(name)
        if weight.dtype is torch.int8:
            weight = Int8(weight, self._weight(f"{name}_scale")).dequantise(self.dtype)
        with self._loaded(self._norm, "model.norm.") as norm:
            yield lambda hidden: nn.functional.linear(norm(hidden), weight).float()

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Load decoder layer ``index`` for the duration of the block."""
        with self._loaded(self._layers[index], f"{LAYERS}.{index}.") as module:
            yield module

    def release(self, module: nn.Module) -> None:
        """Free a part of the loaded layer that is no longer needed, unless the checkpoint stays in memory."""
        if not self._resident:
            module.to("meta")

    def _stays(self) -> bool:
        """Return whether the model stays in memory between passes.

        A GPU keeps it if all its weights would take a quarter of the free bytes at most: two models are compared, and
        the hidden states need room.
        """
        if self.device.type != "cuda":
            return self.reader.total_bytes() <= RESIDENT_BYTES
        return 4 * self.reader.total_parameters() * self.dtype.itemsize <= free_memory(self.device)

    def _weight(self, name: str) -> Tensor:
        tensor = self.reader[name]
        few_bits = tensor.itemsize == 1 or name.endswith(".weight_scale")
        exact = few_bits or not tensor.is_floating_point()  # pivots
        return tensor.to(self.device, tensor.dtype if exact else self.dtype)

    @contextmanager
    def _loaded(self, module: nn.Module, prefix: str) -> Iterator[nn.Module]:
        if next(module.parameters()).is_meta:
            state = {name.removeprefix(prefix): self._weight(name) for name in self.reader.under(prefix)}
            state = {name: tensor for name, tensor in state.items() if not name.endswith("rotary_emb.inv_freq")}
            try:
                module.load_state_dict(state, assign=True)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[-1].strip()
                raise UserError(f"{self.reader.folder}: config.json and {prefix}* disagree ({reason})") from None
        try:
            yield module
        finally:
            self.release(module)


def run_layer(layer: nn.Module, hidden: Tensor, rotary: Rotary, **kwargs: Any) -> Tensor:
    """Run one decoder layer on ``hidden`` [rows, length, hidden], with causal attention and no padding."""
    out = layer(hidden, position_embeddings=rotary, **kwargs)
    return out[0] if isinstance(out, tuple) else out  # a tuple before transformers 4.54


def advance(layer: nn.Module, hidden: Tensor, rotary: Rotary) -> Tensor:
    """Return the layer's outputs [rows, length, hidden] for its inputs ``hidden`` of the same shape."""
    return of_batches(lambda batch: run_layer(layer, batch, rotary), hidden)


def of_batches(function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Return ``function`` of the hidden states [rows, length, hidden], batch by batch: a tensor of the same shape."""
    outputs = torch.empty_like(hidden)  # a list of the batches to concatenate would take the memory twice
    for batch, part in zip(batches(hidden), batches(outputs), strict=True):
        part.copy_(function(batch).view_as(part))
    return outputs


def batches(hidden: Tensor) -> tuple[Tensor, ...]:
    """Split rows into groups of about BATCH_TOKENS tokens."""
    return hidden.split(max(1, BATCH_TOKENS // hidden.shape[1]))
