"""Drafters: they guess the next tokens of a sequence, which the model then verifies in one step."""

from __future__ import annotations

import time
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor

from neuronmm.engine.cpu_decoder import CpuDecoder
from neuronmm.engine.slots import CHUNK
from neuronmm.kernels.cpu.library import MAX_BATCH


class Drafter(Protocol):
    """Guesses how one sequence goes on. ``context`` is the prompt and the answer so far; it only grows.

    ``acceptance`` is the share of its tokens that the model is expected to choose too, before any was compared.
    """

    acceptance: float

    def cost(self, count: int) -> float:
        """Predict the seconds of a draft of ``count`` tokens; 0 if they do not matter."""
        ...

    def behind(self, context: list[int]) -> float:
        """Predict the seconds that the next draft takes in addition, to read what was generated without drafts."""
        ...

    def propose(self, context: list[int], count: int) -> list[int]:
        """Return at most ``count`` tokens that may follow."""
        ...


class NgramDrafter:
    """Continues as the context did after the last earlier occurrence of its last tokens ("prompt lookup").

    The longest match of 2 to 4 tokens counts. Source: Saxena, Prompt Lookup Decoding, 2023,
    https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    acceptance = 0.7
    _SIZES = (4, 3, 2)

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the position after its last occurrence
        self._indexed = 0

    def cost(self, count: int) -> float:
        """See :class:`Drafter`."""
        return 0.0

    def behind(self, context: list[int]) -> float:
        """See :class:`Drafter`."""
        return 0.0

    def propose(self, context: list[int], count: int) -> list[int]:
        """See :class:`Drafter`."""
        for end in range(self._indexed + 1, len(context)):
            for size in self._SIZES:
                if size <= end:
                    self._after[tuple(context[end - size : end])] = end
        self._indexed = len(context) - 1
        for size in self._SIZES:
            start = self._after.get(tuple(context[-size:]))
            if start is not None:
                draft = context[start : start + count]
                while len(draft) < count:  # the context repeats itself, with this period
                    draft.append(draft[start - len(context)])
                return draft
        return []


class ModelDrafter:
    """Decodes greedily with another model. It keeps its cache and reads only what is new since the last draft.

    It reads a long context one chunk per call. It drafts when it has read all of it.

    ``step_seconds`` is the time of one of its steps. ``vocabulary`` is the number of tokens that both models have.
    """

    acceptance = 0.7

    def __init__(self, decoder: CpuDecoder, step_seconds: float, vocabulary: int) -> None:
        self._decoder, self._vocabulary = decoder, vocabulary
        self._step_seconds = step_seconds
        self._held: list[int] = []  # the tokens in the cache
        self._context = 0  # how many of them are certain

    def cost(self, count: int) -> float:
        """See :class:`Drafter`."""
        return count * self._step_seconds

    def behind(self, context: list[int]) -> float:
        """See :class:`Drafter`."""
        unread = max(len(context) - self._context - MAX_BATCH, 0)  # the tokens of one step belong to the next draft
        return unread / MAX_BATCH * self._step_seconds

    def propose(self, context: list[int], count: int) -> list[int]:
        """See :class:`Drafter`."""
        held = self._known(context)
        end = min(held + CHUNK, len(context))
        if max(context[held:end]) >= self._vocabulary:  # the draft cannot read it
            return []
        logits = self._read(context[held:end], held)
        if end < len(context):  # the next steps read the rest; a row that arrives meanwhile waits for one chunk
            self._held, self._context = context[:end], end
            return []
        draft = [self._likeliest(logits)]
        while len(draft) < count:
            start = time.perf_counter()
            logits = self._decoder.decode(torch.tensor(draft[-1:]))
            self._step_seconds += (time.perf_counter() - start - self._step_seconds) / MAX_BATCH
            draft.append(self._likeliest(logits))
        self._held, self._context = context + draft[:-1], len(context)
        return draft

    def _likeliest(self, logits: Tensor) -> int:
        return int(logits.flatten()[: self._vocabulary].argmax())

    def _known(self, context: list[int]) -> int:
        """Return how many of the context's tokens are in the cache; the last one is never counted."""
        pairs = zip(self._held[self._context :], context[self._context : -1], strict=False)
        return self._context + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _read(self, tokens: list[int], held: int) -> Tensor:
        """Append tokens to the first ``held`` ones and return the last logits [vocab]."""
        if not held:
            prompt = torch.tensor([tokens])
            return self._decoder.prefill(prompt, torch.ones_like(prompt))[0]
        self._decoder.rewind(held)
        if len(tokens) > MAX_BATCH:
            return self._decoder.extend(torch.tensor([tokens]))[0]
        return self._decoder.verify(torch.tensor(tokens))[-1]


class FewerBitsDrafter(ModelDrafter):
    """Decodes greedily with the same model in fewer bits, on the cache of the model itself.

    The model has written the keys and values of all tokens but the last one, so there is no prompt to read and nothing
    to catch up with. What the draft writes, the model replaces when it verifies the draft.
    """

    acceptance = 0.9  # the least of two models in int4 was 0.88 (docs/results/speculation.md)

    def behind(self, context: list[int]) -> float:
        """See :class:`Drafter`."""
        return 0.0

    def _known(self, context: list[int]) -> int:
        return len(context) - 1
