"""``nki.isa``, second part: instructions that choose, place or summarise elements, destination first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuronmm.emulator.nki import engines, instructions, selection, statistics
from neuronmm.emulator.nki.index import Affine
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.neuronxcc_isa import reads_out, reordered
from neuronmm.emulator.nki.ops import OPS, as_op
from neuronmm.emulator.nki.tile import Tile

__all__ = [
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "dma_transpose",
    "iota",
    "max8",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_stream_shuffle",
    "scalar_tensor_tensor",
    "select_reduce",
    "tensor_copy_predicated",
]


def _pattern(dst: Tile, pattern: Sequence[Sequence[int]], offset: int, channel_multiplier: int) -> np.ndarray:
    """The integers of an affine pattern ``[[step, count], ...]`` of the free elements, in the shape of ``dst``."""
    counts, steps = tuple(n for _, n in pattern), tuple(step for step, _ in pattern)
    grid = Affine((dst.shape[0], *counts), (channel_multiplier, *steps), offset).values()
    if grid.size != dst.size:
        current().fail("shape", "the pattern has another size than the result", dst.shape, grid.shape)
    return grid.reshape(dst.shape)


def iota(
    dst: Tile, pattern: Sequence[Sequence[int]], offset: int = 0, channel_multiplier: int = 0, name: str | None = None
) -> None:
    """Fill ``dst`` with ``offset + partition * channel_multiplier`` plus the pattern's integers; on GpSimd."""
    selection.iota(dst, _pattern(dst, pattern, offset, channel_multiplier))


def affine_select(
    dst: Tile, pattern: Sequence[Sequence[int]], channel_multiplier: int, on_true_tile: Tile, on_false_value: float,
    cmp_op: Any = OPS["equal"], offset: int = 0, name: str | None = None,
) -> None:  # fmt: skip
    """``dst = on_true_tile`` where the pattern's integer compares so with 0, else the number; on GpSimd."""
    chosen = as_op(cmp_op).function(_pattern(dst, pattern, offset, channel_multiplier), 0)
    selection.affine_select(dst, chosen, on_true_tile, on_false_value)


def nc_stream_shuffle(dst: Tile, src: Tile, shuffle_mask: Sequence[int], name: str | None = None) -> None:
    """In each 32 partitions: ``dst[i] = src[shuffle_mask[i]]``; 255 leaves ``dst[i]`` as it is."""
    selection.shuffle(dst, src, shuffle_mask)


def tensor_copy_predicated(
    dst: Tile, src: Any, predicate: Tile, reverse_pred: bool = False, name: str | None = None
) -> None:
    """Overwrite ``dst`` with ``src`` where ``predicate`` is not 0."""
    selection.copy_predicated(dst, src, predicate, reverse_pred)


def select_reduce(
    dst: Tile, predicate: Tile, on_true: Tile, on_false: Any, reduce_res: Tile | None = None, reduce_cmd: Any = None,
    reduce_op: Any = OPS["maximum"], reverse_pred: bool = False, name: str | None = None,
) -> None:  # fmt: skip
    """``dst = on_true`` where ``predicate`` is not 0, else ``on_false``; ``reduce_res`` receives its maximum."""
    if instructions.reduction_of(reduce_op)[0] != "maximum":
        current().fail("reduction", "a selection reduces with maximum only", "maximum", str(reduce_op))
    selection.select(dst, predicate, on_true, on_false, reads_out(reduce_cmd, reduce_res), reverse_pred)


def scalar_tensor_tensor(
    dst: Tile, data: Tile, op0: Any, operand0: Any, op1: Any, operand1: Tile, reverse0: bool = False,
    reverse1: bool = False, name: str | None = None,
) -> None:  # fmt: skip
    """``dst = (data op0 operand0) op1 operand1``: a per-partition operand, then a tile."""
    instructions.scalar_tensor(dst, data, op0, operand0, op1, operand1, reverse0, reverse1)


def dma_transpose(dst: Tile, src: Tile, axes: Any = None, name: str | None = None) -> None:
    """``dst`` = ``src`` (2 to 4 axes, in HBM or SBUF) with its axes in reverse; of 4, the middle two stay."""
    engines.dma(dst, reordered(src, axes))


def bn_stats(dst: Tile, data: Tile, name: str | None = None) -> None:
    """Count, mean and count times variance of each partition's even elements, then of its odd ones: [p, 6]."""
    statistics.bn_stats(dst, data)


def bn_aggr(dst: Tile, data: Tile, name: str | None = None) -> None:
    """Mean and variance of each partition from the results of :func:`bn_stats`: [p, 2]."""
    statistics.bn_aggr(dst, data)


def max8(dst: Tile, src: Tile, name: str | None = None) -> None:
    """The 8 largest elements of each partition, the largest first."""
    selection.max8(dst, src)


def nc_find_index8(dst: Tile, data: Tile, vals: Tile, name: str | None = None) -> None:
    """The first places in each partition of ``data`` of its 8 ``vals``."""
    selection.find_index8(dst, data, vals)


def nc_match_replace8(
    dst: Tile, data: Tile, vals: Tile, imm: float, dst_idx: Tile | None = None, name: str | None = None
) -> None:
    """``dst = data`` with the first match of each of ``vals`` replaced by ``imm``; ``dst_idx`` receives the places."""
    selection.match_replace8(dst, data, vals, imm, dst_idx)
