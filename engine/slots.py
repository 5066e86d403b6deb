"""Slots of a continuous batch on this machine's decoders: prompts are prefilled alone, decode steps run together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from neuronmm.engine.cpu_decoder import CpuDecoder, describe
from neuronmm.engine.decoder import Decoder, new_cache
from neuronmm.kernels.cpu.library import MAX_BATCH
from neuronmm.kernels.cpu.step import DecodeStep

CHUNK = 128
"""Prompt tokens per call, so that the other rows wait for no more than these."""


class RowDecoder(Decoder, Protocol):
    """A decoder that reads a prompt in several calls."""

    def extend(self, input_ids: Tensor) -> Tensor:
        """Append the tokens [batch, n] to rows without padding and return the logits [batch, vocab] of the last."""
        ...


class RowSlots:
    """Slots where each is a decoder of one row, for any device; a step calls the decoders one after the other.

    The logits of a sequence are exactly those that it has alone. A prompt is read in pieces of ``chunk`` tokens, or in
    one.
    """

    def __init__(self, rows: Sequence[RowDecoder], chunk: int | None = CHUNK) -> None:
        self.rows, self.batch, self.chunk = rows, len(rows), chunk

    def join(self, slot: int, input_ids: Tensor) -> Tensor:
        """See :class:`~neuronmm.engine.continuous.Slots`."""
        return self.rows[slot].prefill(input_ids[None], torch.ones_like(input_ids[None]))[0]

    def extend(self, slot: int, input_ids: Tensor) -> Tensor:
        """See :class:`~neuronmm.engine.continuous.Slots`."""
        return self.rows[slot].extend(input_ids[None])[0]

    def step(self, slots: list[int], token_ids: Tensor) -> Tensor:
        """See :class:`~neuronmm.engine.continuous.Slots`; the other slots keep their sequences."""
        return torch.cat([self.rows[slot].decode(token[None]) for slot, token in zip(slots, token_ids, strict=True)])


class CpuSlots(RowSlots):
    """Slots on the C++ core: up to 8 sequences per call, each at its own position of one cache.

    The logits of a sequence are exactly those that it has alone, because the core computes each row as if it were.

    Raises:
        KernelError: the core does not support the model.
    """

    rows: Sequence[CpuDecoder]

    def __init__(self, model: Any, batch: int, max_len: int) -> None:
        cache, weights = new_cache(model, batch, max_len), describe(model, max_len)
        super().__init__([CpuDecoder(model, 1, max_len, weights, cache.row(i)) for i in range(batch)])
        self._core_step = DecodeStep(weights, cache.keys, cache.values)

    @torch.inference_mode()
    def step(self, slots: list[int], token_ids: Tensor) -> Tensor:
        """See :class:`~neuronmm.engine.continuous.Slots`; the other slots keep their sequences."""
        lanes = torch.tensor(slots, dtype=torch.int32)
        filled = torch.tensor([self.rows[slot].cache.length for slot in slots], dtype=torch.int32)
        parts = zip(*(tensor.split(MAX_BATCH) for tensor in (token_ids, lanes, filled)), strict=True)
        logits = torch.cat([self._core_step.step_lanes(*part) for part in parts])
        for slot in slots:
            self.rows[slot].cache.length += 1
        return logits
