"""The arguments of a step of NxD Inference's forward, from those of the HLO hosts' models.

NxD pads prompts on the right and numbers the positions of each row from 0; every row of a decode step has its own.
Its logits are those of the row's highest position, and it fills a prompt's bucket with positions of 1: so a batch with
a prompt of one token is filled here, with positions of 0. Nothing here imports NxD.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Step(NamedTuple):
    """``inputs``: the keyword arguments of NxD's forward. ``rows``: which rows of its logits are the caller's."""

    inputs: dict[str, Tensor]
    rows: Tensor


def batch(input_ids: Tensor, cache_ids: Tensor | None, start_ids: Tensor, longest: int) -> Step:
    """Return a step of a static batch.

    Dimensions: ``input_ids`` [rows, length], left-padded; ``start_ids`` [rows], the paddings; ``cache_ids`` [1]: the
    position of a decode step in the padded rows, None for prompts. ``longest``: positions of the largest bucket.
    """
    rows, start = torch.arange(len(input_ids)), start_ids.long()
    if cache_ids is not None:
        return Step({"input_ids": input_ids, "position_ids": (cache_ids.long() - start)[:, None]}, rows)
    return Step(_prompts(moved(input_ids, start), input_ids.shape[1] - start, longest), rows)


def slots(input_ids: Tensor, cache_ids: Tensor | None, start_ids: Tensor, longest: int) -> Step:
    """Return a step of a continuous batch: one prompt that joins a slot, or one token for each running slot.

    Dimensions: ``input_ids`` and ``cache_ids``, the positions, [rows, length]; ``start_ids`` [rows]: slots. NxD takes
    the rows of a full batch in the order of the slots.
    """
    assert cache_ids is not None
    if input_ids.shape[1] > 1:
        length = cache_ids.max(1).values + 1
        prompt = _prompts(input_ids[:, : int(length)], length, longest)
        return Step({**prompt, "seq_ids": start_ids}, torch.arange(1))
    order = start_ids.argsort()
    inputs = {"input_ids": input_ids[order], "position_ids": cache_ids[order], "seq_ids": start_ids[order]}
    return Step(inputs, order.argsort())


def _prompts(right: Tensor, lengths: Tensor, longest: int) -> dict[str, Tensor]:
    """Return the arguments of prompts that are padded on the right. Dimensions: ``lengths`` [rows]."""
    if int(lengths.min()) == 1:
        right = pad(right, (0, longest - right.shape[1]))
    at = torch.arange(right.shape[1])
    mask = (at < lengths[:, None]).long()
    return {"input_ids": right, "attention_mask": mask, "position_ids": at * mask}


def moved(rows: Tensor, start: Tensor) -> Tensor:
    """Move each row to the left by its padding, [rows]; the padding follows it."""
    length = rows.shape[1]
    return rows.gather(1, (torch.arange(length) + start.long()[:, None]) % length)
