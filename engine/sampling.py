"""From logits to a token: greedy, or a draw after the penalties and filters that transformers implements."""

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
    TopPLogitsWarper,
)

from neuronmm.models.errors import UserError

LEAST = 1e-4
"""Least temperature above 0 and least penalty: a logit divided by far less is infinite in float32."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    ``temperature`` 0 is greedy and leaves ``top_k``, ``top_p`` and ``seed`` without effect; ``top_k`` 0 and ``top_p`` 1
    mean off. ``repetition_penalty`` (Keskar et al. 2019, arXiv 1909.05858; 1 is off) sees the prompt and the
    generated tokens. Row i of a batch draws from a generator of its own, seeded with ``seed + i``, so a row's draws do
    not depend on its neighbours; ``seed`` None takes a fresh seed. Generation ends at an end-of-sequence token, before
    the first of the ``stop`` strings, or after ``max_new_tokens``.

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
                self.temperature == 0 or LEAST <= self.temperature < math.inf,
                "temperature",
                f"0 (greedy) or {LEAST} on",
            ),
            (self.top_k >= 0, "top_k", "0 (off) or above"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (off)"),
            (
                LEAST <= self.repetition_penalty <= 1 / LEAST,
                "repetition_penalty",
                f"{LEAST} to {1 / LEAST:g}; 1 is off",
            ),
            (self.seed is None or 0 <= self.seed < 2**63, "seed", "between 0 and 2**63"),
            (not isinstance(self.stop, str) and all(self.stop), "stop", "a sequence of non-empty strings"),
        )
        for good, name, wanted in checks:
            if not good:
                raise UserError(f"{name} is {getattr(self, name)!r}; it has to be {wanted}")


class Sampler:
    """Chooses the next token of every row of a batch.

    Dimensions: ``seeds`` one an input row; see :meth:`__call__` for the rest.
    """

    def __init__(self, params: SamplingParams, seeds: list[int], device: torch.device) -> None:
        self._greedy = params.temperature == 0
        self._process: Any = LogitsProcessorList()
        if params.repetition_penalty != 1:
            self._process.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        if not self._greedy:
            if params.temperature != 1:
                self._process.append(TemperatureLogitsWarper(params.temperature))
            if params.top_k:
                self._process.append(TopKLogitsWarper(params.top_k))
            if params.top_p < 1:
                self._process.append(TopPLogitsWarper(params.top_p))
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    @torch.inference_mode()
    def __call__(self, seen: Tensor, logits: Tensor) -> Tensor:
        """Dimensions: seen [batch, tokens so far], no padding token in it; logits [batch, vocab] -> [batch].

        Raises:
            UserError: a row's largest logit is no finite number.
        """
        best, likeliest = logits.max(-1)
        if not torch.isfinite(best).all():
            raise UserError("the model's logits hold NaN or infinity: its weights overflow; try --dtype fp32")
        if self._process:
            logits = self._process(seen, logits.float())
            likeliest = logits.argmax(-1)
        if self._greedy:
            return likeliest
        probabilities = logits.float().softmax(-1)
        rows = zip(probabilities, self._generators, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=generator) for row, generator in rows])
