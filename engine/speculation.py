"""Steps with drafts: one sequence, and in each step as many tokens as a draft predicted right.

Speculative decoding (Leviathan et al. 2023, arXiv 2211.17192) in its strictest form: every token is chosen by the same
sampler from the same logits as without drafts, and a drafted token is accepted if it is that token. The output is thus
that of steps without drafts, whatever the draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from neuronmm.engine.decoder import Decoder
from neuronmm.engine.draft_length import DraftLength, StepTimes
from neuronmm.engine.drafters import Drafter
from neuronmm.engine.loop import DraftCounts, Row, advance
from neuronmm.engine.sampling import Sampler, SamplingParams
from neuronmm.kernels.cpu.library import MAX_BATCH

Token = TypeVar("Token")


class Verifier(Decoder, Protocol):
    """A decoder of one row that takes several tokens in a step, and forgets those that were wrong."""

    def verify(self, token_ids: Tensor) -> Tensor:
        """Append tokens [n] and return the logits [n, vocab] of each, equal to those of n single steps."""
        ...

    def rewind(self, length: int) -> None:
        """Forget the positions from ``length`` on."""
        ...


class Speculation:
    """Drafts for one sequence of ``decoder``: a step of the model gives one token or several.

    While drafts do not pay, a drafter that costs nothing still guesses one token, to notice when they would.
    ``seconds`` learns from every step.
    """

    def __init__(self, decoder: Verifier, drafter: Drafter, seconds: StepTimes) -> None:
        self._decoder, self._drafter, self._seconds = decoder, drafter, seconds
        self._length = DraftLength(seconds, drafter.acceptance)

    def step(
        self, seen: list[int], room: int, choose: Callable[[Tensor], Token], counts: DraftCounts
    ) -> Iterator[Token]:
        """Yield what follows ``seen``, all tokens of the sequence: one token, or at most ``room`` and one.

        The decoder holds all of ``seen`` but the last token, before and after. ``choose`` chooses a token from logits
        [1, vocab] and appends it to ``seen``; what is no token ends the step. ``counts`` are added up.
        """
        decoder, drafter = self._decoder, self._drafter
        count = self._length.choose(min(room, MAX_BATCH - 1), drafter.cost, drafter.behind(seen), room)
        draft = drafter.propose(seen, max(count, 1)) if count or not drafter.cost(1) else []
        verified = draft[:count]
        decoder.rewind(len(seen) - 1)
        begin = time.perf_counter()
        logits = decoder.verify(torch.tensor([seen[-1], *verified]))
        self._seconds.add(1 + len(verified), time.perf_counter() - begin)
        counts.steps += 1
        counts.drafted += len(verified)
        try:
            for place, line in enumerate(logits.split(1)):
                token = choose(line)
                right = place < len(draft) and draft[place] == token
                if place < len(draft):
                    self._length.record(right)
                counts.accepted += right and place < len(verified)
                yield token
                if not right:
                    return
        finally:
            decoder.rewind(len(seen) - 1)


def run(
    decoder: Verifier, row: Row, params: SamplingParams, eos: frozenset[int], speculation: Speculation
) -> Iterator[tuple[Row, str]]:
    """Generate for one row on ``decoder``, and yield each piece of text as soon as it is final."""
    start = time.perf_counter()
    result, seen = row.result, list(row.prompt_ids)
    sampler, counts = Sampler(params, [row.seed], torch.device("cpu")), DraftCounts()
    result.draft = counts
    prompt = torch.tensor([seen])

    def choose(logits: Tensor) -> int:
        past = torch.tensor([seen]) if params.repetition_penalty != 1 else prompt
        seen.append(int(sampler(past, logits)[0]))
        return seen[-1]

    tokens: Iterable[int] = [choose(decoder.prefill(prompt, torch.ones_like(prompt)))]
    while True:
        for token in tokens:
            yield from ((row, piece) for piece in advance(row, token, time.perf_counter() - start, eos) if piece)
            if result.finish_reason:
                return
        room = row.limit - len(result.token_ids) - 1  # a step ends with a token that was not drafted
        tokens = speculation.step(seen, room, choose, counts)
