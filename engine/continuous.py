"""The generation loop for continuous batching: a sequence takes a free slot and releases it when it ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from neuronmm.engine.loop import Row, advance
from neuronmm.engine.sampling import Sampler, SamplingParams


class Slots(Protocol):
    """The interface of a backend with ``batch`` slots, each of which holds one independent sequence.

    Dimensions: input_ids [prompt]; token_ids [n]; logits [vocab] and [n, vocab], of the last positions.
    """

    batch: int

    def join(self, slot: int, input_ids: Tensor) -> Tensor:
        """Start a sequence in a slot and return its logits. The other slots do not advance."""
        ...

    def step(self, slots: list[int], token_ids: Tensor) -> Tensor:
        """Append one token to the sequence in each of these slots. Sequences in other slots are lost."""
        ...


@dataclass
class _Sequence:
    row: Row
    sampler: Sampler
    seen: list[int]

    def choose(self, logits: Tensor, device: torch.device) -> int:
        token = int(self.sampler(torch.tensor([self.seen], device=device), logits[None])[0])
        self.seen.append(token)
        return token


def run(
    slots: Slots, rows: list[Row], params: SamplingParams, eos: frozenset[int], device: torch.device
) -> Iterator[tuple[Row, str]]:
    """Generate for all rows as slots become free, and yield each piece of text as soon as it is final.

    The ``ttft`` of a row counts from the start of the run and includes the wait for a slot. The rows' results are
    complete when the iterator is exhausted.
    """
    start = time.perf_counter()
    waiting, running = deque(rows), dict[int, _Sequence]()

    def enter(slot: int, logits: Tensor) -> Iterator[tuple[Row, str]]:
        """Sample the next token of a slot, and free the slot if the sequence has ended."""
        sequence = running[slot]
        token, row = sequence.choose(logits, device), sequence.row
        yield from ((row, piece) for piece in advance(row, token, time.perf_counter() - start, eos) if piece)
        if row.result.finish_reason:
            del running[slot]

    while waiting or running:
        for slot in sorted(set(range(slots.batch)) - set(running))[: len(waiting)]:
            row = waiting.popleft()
            running[slot] = _Sequence(row, Sampler(params, [row.seed], device), list(row.prompt_ids))
            yield from enter(slot, slots.join(slot, torch.tensor(row.prompt_ids, device=device)))
        if running:
            now = list(running)
            logits = slots.step(now, torch.tensor([running[slot].seen[-1] for slot in now], device=device))
            for slot, line in zip(now, logits, strict=True):
                yield from enter(slot, line)
