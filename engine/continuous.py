"""Continuous batching: a sequence takes a free slot, advances with the others, and releases the slot when it ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from neuronmm.engine.loop import DraftCounts, Row, advance
from neuronmm.engine.sampling import NOT_FINITE, Sampler, SamplingParams, logprobs
from neuronmm.engine.speculation import Speculation
from neuronmm.kernels.cpu.library import MAX_BATCH
from neuronmm.models.errors import UserError


class Slots(Protocol):
    """The interface of a backend with ``batch`` slots, each of which holds one independent sequence.

    Dimensions: input_ids [prompt]; token_ids [n]; logits [vocab] and [n, vocab], of the last positions.
    """

    batch: int

    @property
    def chunk(self) -> int | None:
        """Tokens of a prompt per call of :meth:`join` and :meth:`extend`; None: a prompt is read as a whole.

        The last call takes up to 8 more.
        """
        ...

    def join(self, slot: int, input_ids: Tensor) -> Tensor:
        """Start a sequence in a slot and return its logits. The other slots do not advance."""
        ...

    def extend(self, slot: int, input_ids: Tensor) -> Tensor:
        """Read the next tokens [n] of the prompt in a slot and return its logits, if there are chunks."""
        ...

    def step(self, slots: list[int], token_ids: Tensor) -> Tensor:
        """Append one token to the sequence in each of these slots. Sequences in other slots are lost."""
        ...


@dataclass
class _Sequence:
    slot: int
    sampler: Sampler
    ends: frozenset[int]
    seen: list[int]
    read: int = 0
    """Tokens of the prompt that have been read."""

    def choose(self, logits: Tensor, token: int, finite: bool) -> int | UserError:
        """Return the next token after ``logits`` [1, vocab], whose likeliest is ``token``, or why there is none."""
        if not finite:
            return UserError(NOT_FINITE)
        if not self.sampler.plain:
            seen = self.seen if self.sampler.penalises else self.seen[-1:]  # a long text takes as long as a step
            try:
                token = int(self.sampler(torch.tensor([seen], device=logits.device), logits)[0])
            except UserError as error:  # ends this row, not the others
                return error
        self.seen.append(token)
        return token


class Batch:
    """The sequences in the slots of a backend. The next token of a row comes from :meth:`read` or :meth:`step`.

    The tokens of a row do not depend on the other rows. If its logits are not finite, there is an error instead of a
    token, and the row has to leave.

    ``speculate`` begins the drafts of the sequence in a slot. A row has drafts while it is alone: a step of several
    rows reads the weights once for all of them anyway.
    """

    def __init__(
        self, slots: Slots, device: torch.device, speculate: Callable[[int], Speculation] | None = None
    ) -> None:
        self._slots, self._device, self._speculate = slots, device, speculate
        self._running: dict[Row, _Sequence] = {}
        self._drafts: tuple[Row, Speculation] | None = None

    def __len__(self) -> int:
        return len(self._running)

    @property
    def free(self) -> int:
        """The number of free slots."""
        return self._slots.batch - len(self)

    @property
    def reading(self) -> Row | None:
        """The first row whose prompt is not read yet."""
        return next((row for row, sequence in self._running.items() if sequence.read < len(row.prompt_ids)), None)

    @property
    def ready(self) -> list[Row]:
        """The rows whose prompts are read, which the next step advances."""
        return [row for row, sequence in self._running.items() if sequence.read == len(row.prompt_ids)]

    def join(self, row: Row, params: SamplingParams, ends: frozenset[int]) -> None:
        """Give a row the first free slot; its prompt is still to be read. After a token of ``ends`` it leaves."""
        slot = min(set(range(self._slots.batch)) - {sequence.slot for sequence in self._running.values()})
        self._running[row] = _Sequence(slot, Sampler(params, [row.seed], self._device), ends, list(row.prompt_ids))

    def read(self, row: Row) -> int | UserError | None:
        """Read the next chunk of the prompt of a row, and return its first token after the last chunk, else None."""
        sequence = self._running[row]
        end = min(sequence.read + (self._slots.chunk or len(row.prompt_ids)), len(row.prompt_ids))
        if len(row.prompt_ids) - end <= MAX_BATCH:
            end = len(row.prompt_ids)  # so few tokens the core reads as decode steps, which round in another way
        ids = torch.tensor(row.prompt_ids[sequence.read : end], device=self._device)
        logits = (self._slots.extend if sequence.read else self._slots.join)(sequence.slot, ids)
        sequence.read = end
        return self._choose([row], logits[None])[0] if sequence.read == len(row.prompt_ids) else None

    def step(self) -> list[tuple[Row, int | UserError]]:
        """Advance every row that is ready by one token, a row with drafts by one or more; there has to be one."""
        rows = self.ready
        if self._speculate and len(self) == 1:
            return [(rows[0], token) for token in self._drafted(rows[0], self._speculate)]
        sequences = [self._running[row] for row in rows]
        last = torch.tensor([sequence.seen[-1] for sequence in sequences], device=self._device)
        logits = self._slots.step([sequence.slot for sequence in sequences], last)
        return list(zip(rows, self._choose(rows, logits), strict=True))

    def leave(self, row: Row) -> None:
        """Free the slot of a row."""
        del self._running[row]
        if self._drafts and self._drafts[0] is row:
            self._drafts = None

    def _drafted(self, row: Row, speculate: Callable[[int], Speculation]) -> Iterator[int | UserError]:
        """Yield the next tokens of the only row, up to its end."""
        sequence = self._running[row]
        if self._drafts is None or self._drafts[0] is not row:
            self._drafts = row, speculate(sequence.slot)
        counts = row.result.draft = row.result.draft or DraftCounts()
        room = len(row.prompt_ids) + row.limit - len(sequence.seen) - 1
        for token in self._drafts[1].step(sequence.seen, room, lambda line: self._choose([row], line)[0], counts):
            yield token
            if token in sequence.ends:
                return

    @torch.inference_mode()
    def _choose(self, rows: list[Row], logits: Tensor) -> list[int | UserError]:
        """Choose the next tokens, the likeliest of all rows at once: logits [n, vocab]."""
        largest, likeliest = logits.max(-1)
        tokens, finite = likeliest.tolist(), torch.isfinite(largest).tolist()
        chosen = [
            self._running[row].choose(logits[i : i + 1], token=tokens[i], finite=finite[i])
            for i, row in enumerate(rows)
        ]
        for row, token, of_row in zip(rows, chosen, logits, strict=True):
            if row.alternatives is not None and not isinstance(token, UserError):
                row.logprobs.append(logprobs(of_row, token, row.alternatives))
        return chosen


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
            batch.join(row, params, eos)
            token = None
            while token is None:
                token = batch.read(row)
            yield from enter(row, token)
        if len(batch):
            for row, token in batch.step():
                yield from enter(row, token)
