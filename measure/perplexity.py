"""Perplexity the way the literature reports it, with the standard error it usually leaves out.

The whole text is tokenised at once (GPTQ, arXiv 2210.17323, and SVD-LLM, arXiv 2403.07378, do the same), with whatever
special tokens the tokenizer adds at its start and nowhere else. It is cut into windows of ``context`` tokens; a rest
that fills no window is left out. With ``stride`` below ``context`` windows overlap and each scores its last ``stride``
tokens only, so that every scored token has at least ``context - stride`` tokens before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from neuronmm.measure.scoring import hidden_states, negative_log_likelihood
from neuronmm.models import documents
from neuronmm.models.errors import UserError
from neuronmm.models.load import quiet

MAX_CONTEXT = 2048
"""The literature's window; a model with a smaller context takes its own."""


@dataclass(frozen=True)
class Windows:
    """A text cut for scoring: ``ids`` [tokens]; a window begins at each of ``starts``."""

    ids: torch.Tensor
    context: int
    stride: int
    starts: list[int]

    @property
    def first_scored(self) -> int:
        """Where scoring begins within a window; its very first token has nothing before it to be predicted from."""
        return max(self.context - self.stride, 1)

    @property
    def scored_tokens(self) -> int:
        """How many tokens are scored in all."""
        return len(self.starts) * (self.context - self.first_scored)


class _Document(BaseModel):
    """A row of a .jsonl text."""

    text: str


def read_text(path: Path) -> str:
    """The content of a raw text file, or the "text" fields of a .jsonl file joined by blank lines.

    Raises:
        UserError: the file is missing, empty, not UTF-8, or a line has no "text".
    """
    if path.suffix == ".jsonl":
        text = "\n\n".join(row.text for _, row in documents.read_rows(path, _Document, '{"text": "..."}'))
    else:
        text = documents.read_text(path)
    if not text.strip():
        raise UserError(f"{path}: there is no text in it")
    return text


def cut(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    maximum: int,
    context: int | None,
    stride: int | None,
    limit: int | None,
) -> Windows:
    """Tokenise ``text`` and lay the windows; a text shorter than one window is a window of its own length.

    Raises:
        UserError: context or stride is out of range, or there is too little text.
    """
    context = min(MAX_CONTEXT, maximum) if context is None else context
    stride = context if stride is None else stride
    if not 2 <= context <= maximum:
        raise UserError(f"--context is {context}; it has to be between 2 and the model's maximum of {maximum} tokens")
    if not 1 <= stride <= context:
        raise UserError(f"--stride is {stride}; it has to be between 1 and the context of {context} tokens")
    with quiet():  # tokenizers warn of texts longer than the model's context
        ids = torch.tensor(tokenizer(text).input_ids)
    if len(ids) < 2:
        raise UserError("the text has fewer than two tokens; there is nothing to predict")
    size = min(context, len(ids))
    return Windows(ids, size, min(stride, size), list(range(0, len(ids) - size + 1, stride))[:limit])


def window_nlls(model: Any, windows: Windows, advance: Callable[[], None]) -> list[float]:
    """The mean negative log-likelihood of each window's scored tokens, nats a token."""
    device = model.get_input_embeddings().weight.device
    first = windows.first_scored
    means = []
    for start in windows.starts:
        ids = windows.ids[start : start + windows.context].to(device)
        hidden = hidden_states(model, ids[None])[0]
        nll = negative_log_likelihood(model, hidden[first - 1 : -1], ids[first:])
        means.append(nll.double().mean().item())
        advance()
    return means


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """Mean and its standard error, which a single value does not have."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)
