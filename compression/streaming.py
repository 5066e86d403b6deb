"""A model that is run layer by layer from disk, with one layer's weights in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from neuronmm.compression.reader import Reader
from neuronmm.models.errors import UserError, reading
from neuronmm.models.families import LAYERS
from neuronmm.models.load import load_config, quiet
from neuronmm.models.tensors import check_tokens

RESIDENT_BYTES = 1 << 30
"""A checkpoint up to this size stays in memory between passes; a larger one is read again for each."""


class StreamedModel:
    """The decoder layers, embedding and head of a checkpoint, materialised one at a time.

    The modules are transformers' own, built without weights and given each layer's tensors in turn, in ``dtype``, on
    ``device``.

    Raises:
        UserError: unsupported architecture, or tensors that do not fit config.json.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: str = "cpu") -> None:
        self.config = load_config(folder)
        self.reader = Reader(folder)
        self.dtype, self.device = dtype, torch.device(device)
        with quiet(), reading(f"{folder / 'config.json'}: transformers cannot build this model"):
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(self.config, attn_implementation="sdpa").eval()
            # Its frequencies are computed, not loaded, so the rotary module is built with memory from the start.
            self._rotary = type(skeleton.model.rotary_emb)(config=self.config).to(self.device)
        self._layers: nn.ModuleList = skeleton.model.layers
        self._norm, self._head = skeleton.model.norm, skeleton.lm_head
        self._resident = self.reader.total_bytes() <= RESIDENT_BYTES

    def __len__(self) -> int:
        return len(self._layers)

    def linears(self, index: int) -> dict[str, nn.Linear]:
        """The (weightless) linears of layer ``index`` by their name inside the layer."""
        return {name: m for name, m in self._layers[index].named_modules() if isinstance(m, nn.Linear)}

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [rows, length, hidden] of ``tokens`` [rows, length].

        Raises:
            UserError: the model has none for one of the tokens.
        """
        table = self.reader[f"{LAYERS.rpartition('.')[0]}.embed_tokens.weight"]
        check_tokens(tokens, len(table))
        return nn.functional.embedding(tokens, table).to(self.device, self.dtype)

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE's cos and sin [1, length, head_dim] for ``positions`` [1, length]."""
        return self._rotary(hidden, positions.to(self.device))

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [rows, hidden] -> [rows, vocab], float32."""
        tied = self.config.tie_word_embeddings
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        with self._loaded(self._norm, "model.norm.") as norm:
            return nn.functional.linear(norm(hidden), self._weight(head)).float()

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Decoder layer ``index`` with its weights, for the duration of the block."""
        with self._loaded(self._layers[index], f"{LAYERS}.{index}.") as module:
            yield module

    def release(self, module: nn.Module) -> None:
        """Free a part of the layer at hand that is not needed any more; a checkpoint that is kept in memory stays."""
        if not self._resident:
            module.to("meta")

    def _weight(self, name: str) -> Tensor:
        return self.reader[name].to(self.device, self.dtype)

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


def run_layer(layer: nn.Module, hidden: Tensor, rotary: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
    """One decoder layer on [rows, length, hidden]; causal attention, no padding. The return type changed in 4.54."""
    out = layer(hidden, position_embeddings=rotary, **kwargs)
    return out[0] if isinstance(out, tuple) else out
