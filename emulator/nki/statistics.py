"""Instructions that summarise a tile: means and variances of its partitions, a reduction over them."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuronmm.emulator.nki.engines import elementwise
from neuronmm.emulator.nki.instructions import reduction_of
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.tile import Mask, Tile
from neuronmm.emulator.nki.trace import Engine

_MOST = 512
"""Elements a partition that ``bn_stats`` takes."""


def whole_rows(data: Tile, mask: Mask) -> Mask:
    """``mask`` as one flag a partition; it must keep a partition or leave it out."""
    if mask is None:
        return None
    rows = np.broadcast_to(mask, data.shape).reshape(data.shape[0], -1)
    if (rows.any(axis=1) != rows.all(axis=1)).any():
        current().fail("unsupported", "the emulator does not mask statistics along the free axes: slice the operand")
    return rows[:, :1]


def bn_stats(dst: Tile, data: Tile, mask: Mask = None) -> None:
    """Of each partition: count, mean and count times variance of its even elements, then of its odd ones."""
    if data.elements > _MOST:
        current().fail("free size", "bn_stats takes so many elements a partition", _MOST, data.elements)

    def function(x: np.ndarray) -> np.ndarray:
        rows, result = x.reshape(len(x), -1), []
        for part in (rows[:, 0::2], rows[:, 1::2]):
            count = np.full(len(x), part.shape[1], np.float32)
            mean = part.mean(axis=1) if part.shape[1] else np.zeros(len(x), np.float32)
            result += [count, mean, np.square(part - mean[:, None]).sum(axis=1)]
        return np.stack(result, axis=1).reshape(dst.shape)

    elementwise(
        Engine.VECTOR, "bn_stats", dst, (data,), function, mask, shape=data.shape, kept=whole_rows(data, mask)
    )  # fmt: skip


def bn_aggr(dst: Tile, data: Tile, mask: Mask = None) -> None:
    """Mean and variance of each partition from its ``(count, mean, count * variance)`` triples."""
    if data.elements % 3:
        current().fail("shape", "bn_aggr takes triples", "a multiple of 3", data.elements)

    def function(x: np.ndarray) -> np.ndarray:
        count, mean, spread = np.moveaxis(x.reshape(len(x), -1, 3), 2, 0)
        total = count.sum(axis=1)
        middle = (count * mean).sum(axis=1) / total
        around = (spread + count * np.square(mean - middle[:, None])).sum(axis=1)
        return np.stack([middle, around / total], axis=1).reshape(dst.shape)

    elementwise(
        Engine.VECTOR, "bn_aggr", dst, (data,), function, mask, shape=data.shape, kept=whole_rows(data, mask)
    )  # fmt: skip


def partition_reduce(dst: Tile, op: Any, data: Tile, mask: Mask = None) -> None:
    """Reduce ``data`` over its partitions with add or maximum, on GpSimd; ``dst`` has one partition."""
    machine = current()
    name, reducer, neutral = reduction_of(op)
    if name not in ("add", "maximum"):
        machine.fail("reduction", f"GpSimd does not reduce partitions with {name}", "add, maximum", name)

    def function(x: np.ndarray) -> np.ndarray:
        chosen = x if mask is None else np.where(mask, x, np.float32(neutral))
        return reducer(chosen, axis=0).reshape(dst.shape)

    kept = None if mask is None else np.any(np.broadcast_to(mask, data.shape), axis=0, keepdims=True)
    elementwise(
        Engine.GPSIMD, "tensor_partition_reduce", dst, (data,), function, mask, shape=data.shape, kept=kept
    )  # fmt: skip
