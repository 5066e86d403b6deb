"""Let a model that is streamed from disk continue rows of tokens, with the weights of one layer in memory at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from neuronmm.compression.streaming import StreamedModel, run_layer
from neuronmm.kernels.grouped_attention import grouped_attention
from neuronmm.kernels.widened_linears import widened_linears
from neuronmm.models.chat import ChatTemplate
from neuronmm.models.errors import UserError
from neuronmm.models.load import quiet

Choice = Callable[[Tensor], Tensor]
"""Choose the next tokens [rows] from logits [rows, vocabulary]."""

_MARK = "\u241fcontent\u241f"


def greedy(logits: Tensor) -> Tensor:
    """Choose the most probable token of each row."""
    return logits.argmax(dim=-1)


class Sampled:
    """The choice that samples at temperature 1, seeded."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        return self.among(logits.softmax(dim=-1))

    def among(self, probabilities: Tensor) -> Tensor:
        """Choose the next tokens [rows] by their ``probabilities`` [rows, vocabulary].

        Raises:
            UserError: a probability is not finite.
        """
        # One uniform number per row, inverted by the cumulative distribution; torch.multinomial draws one per logit.
        cumulative = probabilities.cumsum(dim=-1)
        if not cumulative[:, -1].isfinite().all():
            raise UserError(
                "the model's logits hold NaN or infinity; the checkpoint is damaged or unstable in its dtype"
            )
        uniform = torch.rand(len(cumulative), 1, generator=self._generator).to(cumulative.device) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, uniform)[:, 0].clamp_(max=cumulative.shape[1] - 1)

    def skip(self, rows: int, together: int) -> None:
        """Leave out the random numbers of ``rows`` rows of logits, given ``together`` at a time."""
        for call in torch.empty(rows, 1).split(together):
            torch.rand(call.shape, generator=self._generator)


@torch.inference_mode()
def continue_rows(
    model: StreamedModel, openings: Sequence[Sequence[int]], length: int, choose: Choice, advance: Callable[[], None]
) -> Tensor:
    """Continue each opening to ``length`` tokens: [rows, length].

    The first pass takes as many tokens as all openings have, each further one one token of every row. ``advance`` is
    called ``length`` times.

    Raises:
        UserError: the choice needs finite logits and gets others, or the installed transformers names the layers' cache
            in an unknown way.
    """
    tokens = torch.zeros(len(openings), length, dtype=torch.long)
    for row, opening in enumerate(openings):
        tokens[row, : len(opening)] = torch.tensor(opening)
    opened = torch.tensor([len(opening) for opening in openings])
    with quiet():
        cache = DynamicCache()
    begin = 0
    with widened_linears(model.device, in_core=True), grouped_attention():
        for end in range(int(opened.min()), length):
            hidden = model.embed(tokens[:, begin:end])
            rotary = model.rotary(hidden, torch.arange(begin, end)[None])
            for index in range(len(model)):
                with model.layer(index) as layer:
                    hidden = run_layer(layer, hidden, rotary, **{_cache_argument(layer): cache}, use_cache=True)
            with model.head() as logits:
                chosen = choose(logits(hidden[:, -1])).cpu()
            tokens[:, end] = torch.where(end < opened, tokens[:, end], chosen)
            for _ in range(begin, end):
                advance()
            begin = end
    for _ in range(begin, length):
        advance()
    return tokens


def around_user(tokenizer: PreTrainedTokenizerBase, *, answer: bool) -> tuple[str, str]:
    """Return what the chat template puts before and after a user's words; with ``answer``, up to the answer's start.

    Raises:
        UserError: the template fails.
    """
    chat = [{"role": "user", "content": _MARK}]
    problem = "the chat template of this model's tokenizer fails; calibrate on a file of text instead"
    text = ChatTemplate(tokenizer)(chat, answer=answer, problem=problem)
    before, _, after = text.partition(_MARK)
    return before, after


def first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token before a text: BOS, or the end-of-text token (Qwen), which separates documents in training."""
    start: Any = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return start if start is not None else 0


def _cache_argument(layer: torch.nn.Module) -> str:
    """Return the name of the layers' cache argument, which transformers changed in 4.56 and in 5.24.

    Layers ignore arguments that they do not know, so a wrong name would silently compute without a cache.
    """
    accepted = inspect.signature(layer.forward).parameters
    for name in ("cache", "past_key_values", "past_key_value"):
        if name in accepted:
            return name
    raise UserError("this release of transformers renamed the cache of its layers; install transformers 5.24 or older")
