"""The loss of the whole model: KL divergence from the dense model's next-token distributions, or cross entropy.

Compression leaves the output head alone, so the dense model's final hidden states say everything about its logits: they
are computed once and kept, and dense and compressed model are never in memory together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from neuronmm.models.load import load_pretrained

PASS_TOKENS = 1024  # tokens whose activations are held at once, at least one row
# Positions that meet the output head at once: the logits of a whole pass would dwarf the model. 256 x 49152 of them are
# more than glibc hands out again (32 MB): a step then takes a tenth longer, for page faults.
_CHUNK = 128


def rows_a_pass(length: int) -> int:
    """How many rows of this length run through the model at once."""
    return max(1, PASS_TOKENS // length)


@dataclass(frozen=True)
class Lesson:
    """Rows of token ids [rows, length], and the dense model's final states [rows, length, hidden] or None."""

    tokens: Tensor
    states: Tensor | None

    def __len__(self) -> int:
        return len(self.tokens)

    def pick(self, rows: Tensor) -> Lesson:
        """Some of the rows, by number."""
        return Lesson(self.tokens[rows], None if self.states is None else self.states[rows])

    def passes(self) -> list[Lesson]:
        """The rows in groups of at most PASS_TOKENS tokens."""
        together = rows_a_pass(self.tokens.shape[1])
        return [self.pick(part) for part in torch.arange(len(self)).split(together)]

    @property
    def predictions(self) -> int:
        """How many tokens are predicted: all but the first of each row."""
        return len(self) * (self.tokens.shape[1] - 1)


@torch.no_grad()
def dense_states(folder: Path, rows: Tensor, device: str, progress: Callable[[str, float], None]) -> Tensor:
    """The dense model's final hidden states [rows, length, hidden] of ``rows`` [rows, length], float32."""
    model = load_pretrained(folder, torch.float32, device)
    found = []
    for part in Lesson(rows, None).passes():
        found.append(model.model(input_ids=part.tokens.to(device), use_cache=False)[0].cpu())
        progress("dense model", len(part) / len(rows))
    return torch.cat(found)


@torch.no_grad()
def evaluate(model: Any, lesson: Lesson) -> float:
    """Mean loss in nats a predicted token: KL from the dense model's distributions, or cross entropy."""
    return sum(loss_sum(model, part) for part in lesson.passes()) / lesson.predictions


def loss_sum(model: Any, lesson: Lesson, scale: float | None = None, autocast: bool = False) -> float:
    """Summed loss over the predicted tokens of ``lesson``; with ``scale``, add ``scale`` x its gradients to the leaves.

    The head sees a chunk of positions at a time, forwards and backwards, and hands on the gradient of the hidden states
    only, so that logits [chunk, vocabulary] are all that is ever held of a large vocabulary.
    """
    head = model.get_output_embeddings()
    device = head.weight.device
    tokens = lesson.tokens.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        hidden = model.model(input_ids=tokens, use_cache=False)[0][:, :-1].flatten(0, 1).float()
    aims = tokens[:, 1:].flatten() if lesson.states is None else lesson.states[:, :-1].flatten(0, 1).to(device)
    leaf = hidden.detach().requires_grad_(scale is not None)
    total = 0.0
    for chunk, aim in zip(leaf.split(_CHUNK), aims.split(_CHUNK), strict=True):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits = head(chunk).float()
            with torch.no_grad():
                wanted = aim if lesson.states is None else head(aim).float().log_softmax(-1)
        if lesson.states is None:
            loss = cross_entropy(logits, wanted, reduction="sum")
        else:
            loss = kl_div(logits.log_softmax(-1), wanted, reduction="sum", log_target=True)
        if scale is not None:
            (loss * scale).backward()
        total += loss.item()
    if scale is not None:
        hidden.backward(leaf.grad)
    return total
