"""Log-likelihoods of tokens, for perplexity and multiple choice, and the packing of sequences with a common prefix.

A packed row holds the prefix once, followed by the branches: the rest of each sequence. A branch attends to the prefix
and to itself, and its positions continue those of the prefix. Every token thus has the same state as in its own
sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from neuronmm.kernels.widened_linears import widened_linears
from neuronmm.models.errors import UserError
from neuronmm.models.tensors import check_tokens

_ROWS = 256  # positions per call of the output head: the logits of a complete window would be larger than the model


@torch.inference_mode()
def hidden_states(model: Any, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Return the final hidden states: ids [batch, n] -> [batch, n, hidden].

    Without ``positions`` [batch, n] and the additive ``mask`` [batch, 1, n, n], each row is one sequence that begins at
    position 0.

    Raises:
        UserError: the model has no embedding for one of the ids.
    """
    check_tokens(ids, model.config.vocab_size)
    with widened_linears(ids.device):
        return model.model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)[0]


@torch.inference_mode()
def negative_log_likelihood(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return -log p(target | state) in nats and fp32: hidden [n, hidden], targets [n] -> [n].

    Raises:
        UserError: a likelihood is not finite.
    """
    pairs = zip(hidden.split(_ROWS), targets.split(_ROWS), strict=True)
    with widened_linears(hidden.device):
        nll = torch.cat([cross_entropy(model.lm_head(h).float(), t, reduction="none") for h, t in pairs])
    if not torch.isfinite(nll).all():
        raise UserError("the model's likelihoods hold NaN or infinity: its weights overflow; try --dtype fp32")
    return nll


@dataclass(frozen=True)
class Pack:
    """One row: token ``ids``, their ``positions``, and their ``branches`` (0 is the prefix).

    ``paths`` holds for each packed sequence the indices of its tokens in the row.
    """

    ids: list[int]
    positions: list[int]
    branches: list[int]
    paths: list[list[int]]


def pack(sequences: list[list[int]], limit: int) -> Iterator[Pack]:
    """Yield rows that hold ``sequences`` in order. A row exceeds ``limit`` tokens only if a single sequence does."""
    common = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*sequences, strict=False)))
    while sequences:
        length, count = len(sequences[0]), 1
        while count < len(sequences) and length + len(sequences[count]) - common <= limit:
            length += len(sequences[count]) - common
            count += 1
        yield _row(sequences[:count], common)
        sequences = sequences[count:]


def _row(sequences: list[list[int]], common: int) -> Pack:
    ids, positions, branches = sequences[0][:common], list(range(common)), [0] * common
    paths = []
    for branch, sequence in enumerate(sequences, 1):
        paths.append([*range(common), *range(len(ids), len(ids) + len(sequence) - common)])
        ids += sequence[common:]
        positions += range(common, len(sequence))
        branches += [branch] * (len(sequence) - common)
    return Pack(ids, positions, branches, paths)


def lay_out(rows: list[Pack], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and positions [rows, n], padded on the right, and the additive attention mask [rows, 1, n, n]."""
    longest = max(len(row.ids) for row in rows)

    def padded(lists: list[list[int]]) -> Tensor:
        return torch.tensor([values + [0] * (longest - len(values)) for values in lists], device=device)

    branches = padded([row.branches for row in rows])
    seen = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    # The mask is causal, so no token attends to the padding on the right.
    seen &= torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
    return padded([row.ids for row in rows]), padded([row.positions for row in rows]), mask[:, None]
