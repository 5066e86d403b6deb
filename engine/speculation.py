"""The generation loop with drafts: one sequence, and in each step as many tokens as a draft predicted right.

Speculative decoding (Leviathan et al. 2023, arXiv 2211.17192) in its strictest form: every token is chosen by the same
sampler from the same logits as without drafts, and a drafted token is accepted if it is that token. The output is thus
that of :func:`neuronmm.engine.loop.run`, whatever the draft.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from neuronmm.engine.decoder import Decoder
from neuronmm.engine.draft_length import DraftLength, StepTimes
from neuronmm.engine.drafters import Drafter
from neuronmm.engine.loop import DraftCounts, Row, advance
from neuronmm.engine.sampling import Sampler, SamplingParams
from neuronmm.kernels.cpu.library import MAX_BATCH


class Verifier(Decoder, Protocol):
    """A decoder of one row that takes several tokens in a step, and forgets those that were wrong."""

    def verify(self, token_ids: Tensor) -> Tensor:
        """Append tokens [n] and return the logits [n, vocab] of each, equal to those of n single steps."""
        ...

    def rewind(self, length: int) -> None:
        """Forget the positions from ``length`` on."""
        ...


def run(
    decoder: Verifier, row: Row, params: SamplingParams, eos: frozenset[int], drafter: Drafter, seconds: StepTimes
) -> Iterator[tuple[Row, str]]:
    """Generate for one row, and yield each piece of text as soon as it is final.

    While drafts do not pay, a drafter that costs nothing still guesses one token, to notice when they would.
    ``seconds`` learns from every step.
    """
    start = time.perf_counter()
    result, seen = row.result, list(row.prompt_ids)
    sampler = Sampler(params, [row.seed], torch.device("cpu"))
    length, counts = DraftLength(seconds, drafter.acceptance), DraftCounts()
    result.draft = counts
    prompt = torch.tensor([seen])
    logits, draft = decoder.prefill(prompt, torch.ones_like(prompt)), list[int]()
    while True:
        for place, line in enumerate(logits.split(1)):
            past = torch.tensor([seen]) if params.repetition_penalty != 1 else prompt
            token = int(sampler(past, line)[0])
            seen.append(token)
            yield from ((row, piece) for piece in advance(row, token, time.perf_counter() - start, eos) if piece)
            right = place < len(draft) and draft[place] == token
            if place < len(draft):
                length.record(right)
            counts.accepted += right and place + 1 < len(logits)
            if result.finish_reason:
                return
            if not right:
                break
        room = row.limit - len(result.token_ids) - 1  # a step ends with a token that was not drafted
        count = length.choose(min(room, MAX_BATCH - 1), drafter.cost, drafter.behind(seen), room)
        draft = drafter.propose(seen, max(count, 1)) if count or not drafter.cost(1) else []
        verified = draft[:count]
        decoder.rewind(len(seen) - 1)
        begin = time.perf_counter()
        logits = decoder.verify(torch.tensor([seen[-1], *verified]))
        seconds.add(1 + len(verified), time.perf_counter() - begin)
        counts.steps += 1
        counts.drafted += len(verified)
