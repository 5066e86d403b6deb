"""Choose a token from logits: greedily, or sampled after the penalties and filters of transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from neuronmm.models.errors import UserError

MIN_DIVISOR = 1e-4
"""Smallest temperature above 0 and smallest penalty; a logit divided by much less is infinite in float32."""

_CANDIDATES = 512
"""Tokens among which the nucleus is looked for first."""

NOT_FINITE = "the model's logits hold NaN or infinity: its weights overflow; try --dtype fp32"


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    ``temperature`` 0 is greedy and disables ``top_k``, ``top_p`` and ``seed``; ``top_k`` 0 and ``top_p`` 1 mean off.
    ``repetition_penalty`` (Keskar et al. 2019, arXiv 1909.05858; 1 is off) applies to the tokens of the prompt and of
    the answer. Row i of a batch samples with a separate generator, seeded with ``seed + i``, so that its tokens do not
    depend on other rows; ``seed`` None draws a random seed. Generation ends at an end-of-sequence token, before the
    first ``stop`` string, or after ``max_new_tokens``.

    Raises:
        UserError: a value is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            (self.max_new_tokens >= 1, "max_new_tokens", "at least 1"),
            (
                self.temperature == 0 or MIN_DIVISOR <= self.temperature < math.inf,
                "temperature",
                f"0 (greedy) or at least {MIN_DIVISOR}",
            ),
            (self.top_k >= 0, "top_k", "0 (off) or above"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (off)"),
            (
                MIN_DIVISOR <= self.repetition_penalty <= 1 / MIN_DIVISOR,
                "repetition_penalty",
                f"{MIN_DIVISOR} to {1 / MIN_DIVISOR:g}; 1 is off",
            ),
            (self.seed is None or 0 <= self.seed < 2**63, "seed", "between 0 and 2**63"),
            (not isinstance(self.stop, str) and all(self.stop), "stop", "a sequence of non-empty strings"),
        )
        for valid, name, range_ in checks:
            if not valid:
                raise UserError(f"{name} is {getattr(self, name)!r}; it has to be {range_}")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities in nats of a generated token and of the likeliest tokens at its place, likeliest first.

    They are those of the model, before temperature, penalties and filters.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def logprobs(logits: Tensor, token: int, alternatives: int) -> TokenLogprobs:
    """Return the log-probabilities of ``token`` and of the ``alternatives`` likeliest tokens: logits [vocab]."""
    values = logits.float().log_softmax(-1)
    top, at = values.topk(min(alternatives, len(values)))
    return TokenLogprobs(token, float(values[token]), list(zip(at.tolist(), top.tolist(), strict=True)))


class Sampler:
    """Choose the next token of every row of a batch; ``seeds`` has one seed per row."""

    def __init__(self, params: SamplingParams, seeds: list[int], device: torch.device) -> None:
        self._greedy = params.temperature == 0
        self._process: Any = LogitsProcessorList()
        self.penalises = params.repetition_penalty != 1
        """Whether the choice depends on the tokens so far."""
        if self.penalises:
            self._process.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
        if not self._greedy:
            if params.temperature != 1:
                self._process.append(TemperatureLogitsWarper(float(params.temperature)))
            if params.top_k:
                self._process.append(TopKLogitsWarper(params.top_k))
            if params.top_p < 1:
                self._process.append(TopP(params.top_p))
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.plain = self._greedy and not self._process
        """Whether the choice always is the largest logit, whatever the tokens so far."""

    @torch.inference_mode()
    def __call__(self, seen: Tensor, logits: Tensor) -> Tensor:
        """Return one token per row.

        Dimensions: seen [batch, tokens so far], without padding tokens; logits [batch, vocab] -> [batch].

        Raises:
            UserError: the largest logit of a row is not finite, or not after the division by the temperature.
        """
        largest, likeliest = logits.max(-1)
        if not torch.isfinite(largest).all():
            raise UserError(NOT_FINITE)
        if self._process:
            logits = self._process(seen, logits.float())
            likeliest = logits.argmax(-1)
        if self._greedy:
            return likeliest
        cumulative = logits.float().softmax(-1).cumsum(-1)
        if not torch.isfinite(cumulative[:, -1]).all():
            raise UserError(NOT_FINITE)
        drawn = [torch.rand(1, generator=generator, device=logits.device) for generator in self._generators]
        # In (0, total], so that the first sum that reaches it belongs to a token with a probability above 0.
        # One number per row is several times as fast as torch.multinomial, which draws one per token.
        at = (1 - torch.stack(drawn)) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, at)[:, 0]


class TopP:
    """Keep the likeliest tokens up to the first whose sum reaches ``top_p``, as transformers' filter does.

    Nucleus sampling, Holtzman et al. 2019, arXiv 1904.09751. Sorting a vocabulary takes as long as a decode step, so
    the likeliest tokens are selected first, and all are sorted only if those do not reach ``top_p``.
    """

    def __init__(self, top_p: float) -> None:
        self._top_p = top_p

    def __call__(self, seen: Tensor, logits: Tensor) -> Tensor:
        """Set the other logits to minus infinity. Dimensions: logits [batch, vocab] -> the same."""
        probabilities = logits.softmax(-1)
        for count in (min(_CANDIDATES, logits.shape[-1]), logits.shape[-1]):
            likeliest, at = probabilities.topk(count)
            likelier = likeliest.cumsum(-1) - likeliest
            if (likelier[:, -1] >= self._top_p).all():
                break
        unlikely = likelier >= self._top_p
        unlikely[:, 0] = False  # a top_p that is 0 in float32 keeps the likeliest token
        dropped = torch.ones_like(logits, dtype=torch.bool).scatter(-1, at, unlikely)
        return logits.masked_fill(dropped, -torch.inf)
