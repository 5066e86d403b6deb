"""Pack sequences with a common prefix into one row, so that the model processes the prefix once.

The prefix is followed by the branches, the rest of each sequence. A branch attends to the prefix and itself, and its
positions continue those of the prefix. Every token thus has the same state as in its own sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor


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
