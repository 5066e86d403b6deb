"""Perplexity as the literature reports it, with the standard error that it usually leaves out.

The text is tokenised in one piece, as GPTQ (arXiv 2210.17323) and SVD-LLM (arXiv 2403.07378) do, so that special tokens
appear only where the tokenizer adds them, at the start. The tokens are cut into windows of ``context`` tokens; a
remainder shorter than a window is dropped. With ``stride`` below ``context`` the windows overlap and each scores only
its last ``stride`` tokens, so that every scored token has at least ``context - stride`` tokens before it.
"""

from __future__ import annotations

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
"""Window size in the literature; a model with a smaller context uses its own."""


@dataclass(frozen=True)
class Windows:
    """A text cut for scoring: ``ids`` [tokens]; a window begins at each of ``starts``."""

    ids: torch.Tensor
    context: int
    stride: int
    starts: list[int]

    @property
    def first_scored(self) -> int:
        """The index in a window of the first scored token; the first token of all has no context to predict it."""
        return max(self.context - self.stride, 1)

    @property
    def scored_tokens(self) -> int:
        """The number of scored tokens in all windows."""
        return len(self.starts) * (self.context - self.first_scored)

    def same_tokens(self, other: Windows) -> bool:
        """Return whether ``other`` is cut from the same tokens."""
        return torch.equal(self.ids, other.ids)

    def same_sizes(self, other: Windows) -> bool:
        """Return whether the windows of ``other`` are as long and begin at the same places."""
        return (self.context, self.stride, self.starts) == (other.context, other.stride, other.starts)

    def to_json(self) -> dict[str, int]:
        """Return the sizes for the report."""
        return {
            "context": self.context,
            "stride": self.stride,
            "windows": len(self.starts),
            "scored_tokens": self.scored_tokens,
            "text_tokens": len(self.ids),
        }

    def describe(self) -> str:
        """Return the note for the table."""
        return (
            f"perplexity: {len(self.starts)} windows of {self.context} tokens, stride {self.stride}, "
            f"{self.scored_tokens} of {len(self.ids)} tokens scored; special tokens only where the tokenizer "
            "puts them, at the start of the text; standard error over windows"
        )


class _Document(BaseModel):
    """A row of a .jsonl text."""

    text: str


def read_text(path: Path) -> str:
    """Return the content of a raw text file, or the "text" fields of a .jsonl file joined by blank lines.

    Raises:
        UserError: the file is missing, empty or not UTF-8, or a line has no "text".
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
    *,
    context: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
) -> Windows:
    """Tokenise ``text`` and cut it into windows. A text shorter than one window is one window.

    Args:
        tokenizer: the model's.
        text: the text to score.
        maximum: the model's context.
        context: tokens per window; by default 2048, or ``maximum`` if that is less.
        stride: tokens from window to window; by default the context.
        limit: keep only the first windows.

    Raises:
        UserError: context or stride is out of range, or the text has fewer than two tokens.
    """
    context = min(MAX_CONTEXT, maximum) if context is None else context
    stride = context if stride is None else stride
    if not 2 <= context <= maximum:
        raise UserError(f"--context is {context}; it has to be between 2 and the model's maximum of {maximum} tokens")
    if not 1 <= stride <= context:
        raise UserError(f"--stride is {stride}; it has to be between 1 and the context of {context} tokens")
    with quiet():  # tokenizers warn about texts longer than the model's context
        ids = torch.tensor(tokenizer(text).input_ids)
    if len(ids) < 2:
        raise UserError("the text has fewer than two tokens, so there is nothing to predict; give a longer one")
    size = min(context, len(ids))
    return Windows(ids, size, min(stride, size), list(range(0, len(ids) - size + 1, stride))[:limit])


def window_nlls(model: Any, windows: Windows, advance: Callable[[float], None]) -> list[float]:
    """Return the mean negative log-likelihood of each window's scored tokens, in nats per token.

    ``advance`` receives the fraction of the windows that each one is.
    """
    device = model.get_input_embeddings().weight.device
    first = windows.first_scored
    means = []
    for start in windows.starts:
        ids = windows.ids[start : start + windows.context].to(device)
        hidden = hidden_states(model, ids[None])[0]
        nll = negative_log_likelihood(model, hidden[first - 1 : -1], ids[first:])
        means.append(nll.double().mean().item())
        advance(1 / len(windows.starts))
    return means
