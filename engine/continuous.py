"""Continuous batching: a sequence takes a free slot, advances with the others, and releases the slot when it ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from neuronmm.engine.loop import Row, advance
from neuronmm.engine.sampling import NOT_FINITE, Sampler, SamplingParams
from neuronmm.models.errors import UserError


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
    slot: int
    sampler: Sampler
    seen: list[int]

    def choose(self, logits: Tensor, token: int, finite: bool) -> int | UserError:
        """Return the next token after ``logits`` [1, vocab], whose likeliest is ``token``, or why there is none."""
        if not finite:
            return UserError(NOT_FINITE)
        if not self.sampler.plain:
            token = int(self.sampler(torch.tensor([self.seen], device=logits.device), logits)[0])
        self.seen.append(token)
        return token


class Batch:
    """The sequences in the slots of a backend. Each call returns the next token of a row, which keeps its slot.

    The tokens of a row do not depend on the other rows. If its logits are not finite, there is an error instead of a
    token, and the row has to leave.
    """

    def __init__(self, slots: Slots, device: torch.device) -> None:
        self._slots, self._device = slots, device
        self._running: dict[Row, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def free(self) -> int:
        """The number of free slots."""
        return self._slots.batch - len(self)

    def join(self, row: Row, params: SamplingParams) -> int | UserError:
        """Prefill the prompt of a row in the first free slot."""
        slot = min(set(range(self._slots.batch)) - {sequence.slot for sequence in self._running.values()})
        sampler = Sampler(params, [row.seed], self._device)
        self._running[row] = _Sequence(slot, sampler, list(row.prompt_ids))
        logits = self._slots.join(slot, torch.tensor(row.prompt_ids, device=self._device))
        return self._choose([row], logits[None])[0]

    def step(self) -> list[tuple[Row, int | UserError]]:
        """Advance every row by one token; there has to be one."""
        rows = list(self._running)
        sequences = self._running.values()
        last = torch.tensor([sequence.seen[-1] for sequence in sequences], device=self._device)
        logits = self._slots.step([sequence.slot for sequence in sequences], last)
        return list(zip(rows, self._choose(rows, logits), strict=True))

    def leave(self, row: Row) -> None:
        """Free the slot of a row."""
        del self._running[row]

    @torch.inference_mode()
    def _choose(self, rows: list[Row], logits: Tensor) -> list[int | UserError]:
        """Choose the next tokens, the likeliest of all rows at once: logits [n, vocab]."""
        largest, likeliest = logits.max(-1)
        tokens, finite = likeliest.tolist(), torch.isfinite(largest).tolist()
        return [
            self._running[row].choose(logits[i : i + 1], token=tokens[i], finite=finite[i])
            for i, row in enumerate(rows)
        ]


def run(
    slots: Slots, rows: list[Row], params: SamplingParams, eos: frozenset[int], device: torch.device
) -> Iterator[tuple[Row, str]]:
    """Generate for all rows as slots become free, and yield each piece of text as soon as it is final.

    The ``ttft`` of a row counts from the start of the run and includes the wait for a slot. The rows' results are
    complete when the iterator is exhausted.
    """
    start = time.perf_counter()
    waiting, batch = deque(rows), Batch(slots, device)

    def enter(row: Row, token: int | UserError) -> Iterator[tuple[Row, str]]:
        """Add the next token of a row, which leaves if it has ended."""
        if isinstance(token, UserError):
            raise token
        yield from ((row, piece) for piece in advance(row, token, time.perf_counter() - start, eos) if piece)
        if row.result.finish_reason:
            batch.leave(row)

    while waiting or len(batch):
        for _ in range(min(batch.free, len(waiting))):
            row = waiting.popleft()
            yield from enter(row, batch.join(row, params))
        if len(batch):
            for row, token in batch.step():
                yield from enter(row, token)
