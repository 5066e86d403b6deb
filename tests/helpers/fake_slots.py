"""Fake slots for tests of continuous batching, and rows for them."""

from __future__ import annotations

import torch
from torch import Tensor

from neuronmm.engine.loop import Generation, Row
from neuronmm.engine.sampling import SamplingParams
from neuronmm.engine.text import TextStream
from word_tokenizer import word_tokenizer


class FakeSlots:
    """Fake slots: the logits depend on every token of a slot's sequence, and ``diary`` records the calls."""

    def __init__(self, batch: int, chunk: int | None = None) -> None:
        self.batch, self.chunk, self.diary = batch, chunk, []
        self.sequences: dict[int, list[int]] = {}

    def join(self, slot: int, input_ids: Tensor) -> Tensor:
        self.sequences[slot] = input_ids.tolist()
        self.diary.append(f"join {slot}")
        return self.logits(slot)

    def extend(self, slot: int, input_ids: Tensor) -> Tensor:
        self.sequences[slot] += input_ids.tolist()
        self.diary.append(f"extend {slot}")
        return self.logits(slot)

    def step(self, slots: list[int], token_ids: Tensor) -> Tensor:
        if self.chunk is None:
            self.sequences = {slot: self.sequences[slot] for slot in slots}  # slots left out of a step are lost
        for slot, token in zip(slots, token_ids.tolist(), strict=True):
            self.sequences[slot].append(token)
        self.diary.append(f"step {slots}")
        return torch.stack([self.logits(slot) for slot in slots])

    def logits(self, slot: int) -> Tensor:
        state = sum((i + 1) * token for i, token in enumerate(self.sequences[slot]))
        return torch.randn(64, generator=torch.Generator().manual_seed(state))


def row(prompt: list[int], limit: int, params: SamplingParams, seed: int = 7) -> Row:
    stream = TextStream(word_tokenizer(), prompt, params.stop)
    return Row(prompt, limit, "length", seed, stream, Generation("", len(prompt)))
