"""Sequences that begin alike in one row: the common beginning runs through the model once.

After it stand the branches, what is left of each sequence. A branch sees the common beginning and itself, and counts
its positions on from the beginning, so that every token has the state it has in its own sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pack:
    """One row: token ``ids``, their ``positions``, their ``branches`` (0: the common beginning), and for each of the
    packed sequences a path: where in the row its tokens stand.
    """

    ids: list[int]
    positions: list[int]
    branches: list[int]
    paths: list[list[int]]


def pack(sequences: list[list[int]], limit: int) -> Iterator[Pack]:
    """Rows that hold ``sequences`` in their order; a row has more than ``limit`` tokens only if one sequence has."""
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
    """The rows, padded on the right: ids and positions [rows, n], and the mask [rows, 1, n, n] that attention adds."""
    longest = max(len(row.ids) for row in rows)

    def padded(lists: list[list[int]]) -> Tensor:
        return torch.tensor([values + [0] * (longest - len(values)) for values in lists], device=device)

    branches = padded([row.branches for row in rows])
    seen = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    # No token sees what stands to its right, so padding, which stands to the right of all, is seen by none.
    seen &= torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
    return padded([row.ids for row in rows]), padded([row.positions for row in rows]), mask[:, None]
