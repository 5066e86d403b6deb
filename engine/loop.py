"""The generation loop of a static batch: one prefill, then one token per row and step until every row has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from neuronmm.engine.decoder import Decoder
from neuronmm.engine.sampling import Sampler, SamplingParams, TokenLogprobs
from neuronmm.engine.text import TextStream


@dataclass
class DraftCounts:
    """The steps after the prompt, and the tokens that were drafted for them and accepted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass
class Generation:
    """The result for one prompt.

    ``token_ids`` are the generated tokens, including an end-of-sequence token. ``text`` is their text without special
    tokens, cut before a stop string. ``finish_reason`` is ``eos``, ``stop``, ``length`` (max_new_tokens reached) or
    ``context`` (the model's context is full). ``ttft`` is the time in seconds from the start of the batch to its first
    token; ``decode_seconds`` is the time from there to the last token of this row. ``draft`` counts the drafted tokens
    if there is a drafter.
    """

    prompt: str
    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    ttft: float = 0.0
    decode_seconds: float = 0.0
    draft: DraftCounts | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed without the prompt and the first token; None for a single token."""
        later = len(self.token_ids) - 1
        return later / self.decode_seconds if later > 0 and self.decode_seconds > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; times are measured seconds."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


@dataclass(eq=False)
class Row:
    """The state of one sequence of a batch."""

    prompt_ids: list[int]
    limit: int
    limit_reason: str
    seed: int
    stream: TextStream
    result: Generation
    alternatives: int | None = None
    """How many of the likeliest tokens a continuous batch records beside each token; None records nothing."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def run(
    decoder: Decoder, rows: list[Row], params: SamplingParams, eos: frozenset[int], device: torch.device
) -> Iterator[tuple[Row, str]]:
    """Generate for all rows at once, and yield each piece of text as soon as it is final.

    The rows' results are complete when the iterator is exhausted.
    """
    start = time.perf_counter()
    longest = max(len(row.prompt_ids) for row in rows)
    # Padding repeats the row's first token and is masked out, so that a repetition penalty sees no other token.
    padded = [[row.prompt_ids[0]] * (longest - len(row.prompt_ids)) + row.prompt_ids for row in rows]
    masks = [[0] * (longest - len(row.prompt_ids)) + [1] * len(row.prompt_ids) for row in rows]
    seen = torch.tensor(padded, device=device)
    sampler = Sampler(params, [row.seed for row in rows], device)
    logits = decoder.prefill(seen, torch.tensor(masks, device=device))
    while True:
        tokens = sampler(seen, logits)
        values = tokens.tolist()
        elapsed = time.perf_counter() - start
        for row, token in zip(rows, values, strict=True):
            if not row.result.finish_reason:
                yield from ((row, piece) for piece in advance(row, token, elapsed, eos) if piece)
        if all(row.result.finish_reason for row in rows):
            return
        if params.repetition_penalty != 1:
            seen = torch.cat([seen, tokens[:, None]], dim=1)
        logits = decoder.decode(tokens)


def advance(row: Row, token: int, elapsed: float, eos: frozenset[int]) -> Iterator[str]:
    """Append one token to a row's result, and yield the text that becomes final."""
    result = row.result
    result.token_ids.append(token)
    if len(result.token_ids) == 1:
        result.ttft = elapsed
    result.decode_seconds = elapsed - result.ttft
    if token in eos:
        result.finish_reason = "eos"
    else:
        yield row.stream.push(token)
        if row.stream.stopped:
            result.finish_reason = "stop"
        elif len(result.token_ids) == row.limit:
            result.finish_reason = row.limit_reason
    if result.finish_reason:
        yield row.stream.finish()
    result.text = row.stream.text
