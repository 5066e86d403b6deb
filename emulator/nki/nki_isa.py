"""``nki.isa`` (0.3 and later): every instruction takes its destination first and returns nothing.

Arguments and their order are those of the SDK's documentation (2.32); ``name`` is ignored. An instruction raises
NkiError at the kernel's line if an operand breaks a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuronmm.emulator.nki import engines, instructions, selection
from neuronmm.emulator.nki.index import Affine
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.neuronxcc_isa import (
    dma_transposed_view,
    engine,
    gpsimd_engine,
    reduce_cmd,
    reduction_target,
    scalar_engine,
    tensor_engine,
    unknown_engine,
    vector_engine,
)
from neuronmm.emulator.nki.ops import OPS, as_op
from neuronmm.emulator.nki.tile import Tile
from neuronmm.emulator.nki.trace import Engine, Space
from neuronmm.emulator.nki.type_rules import are_wide_integers, check_same

__all__ = [
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "dma_copy",
    "dma_transpose",
    "engine",
    "gpsimd_engine",
    "iota",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_stream_shuffle",
    "nc_transpose",
    "reciprocal",
    "reduce_cmd",
    "scalar_engine",
    "scalar_tensor_tensor",
    "select_reduce",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_tensor",
    "tensor_tensor_scan",
    "unknown_engine",
    "vector_engine",
]


def nc_matmul(
    dst: Tile, stationary: Tile, moving: Tile, accumulate: bool | None = None, name: str | None = None
) -> None:
    """``dst = stationary^T moving``; ``accumulate`` None: the first matmul into a location overwrites, others add."""
    engines.matmul(dst, stationary, moving, accumulate)


def nc_transpose(dst: Tile, data: Tile, engine: Any = None, name: str | None = None) -> None:
    """``dst = data^T`` on the tensor engine, or on the vector engine if ``engine`` says so or dst is in SBUF."""
    instructions.transpose(dst, data, engine)


def activation(
    dst: Tile, op: Any, data: Tile, bias: Any = None, scale: Any = 1.0, reduce_op: Any = None,
    reduce_res: Tile | None = None, reduce_cmd: Any = None, name: str | None = None,
) -> None:  # fmt: skip
    """``dst = op(data * scale + bias)`` on the scalar engine; ``reduce_res`` receives the sum over the free axes."""
    instructions.activation(dst, op, data, bias, scale, None, reduction_target(reduce_cmd, reduce_res), reduce_op)


def activation_reduce(
    dst: Tile, op: Any, data: Tile, reduce_op: Any, reduce_res: Tile, bias: Any = None, scale: Any = 1.0,
    name: str | None = None,
) -> None:  # fmt: skip
    """Like :func:`activation`; always sums the result over the free axes into ``reduce_res``."""
    instructions.activation(dst, op, data, bias, scale, None, reduce_res, reduce_op)


def tensor_reduce(
    dst: Tile, op: Any, data: Tile, axis: Any, negate: bool = False, keepdims: bool = False, name: str | None = None
) -> None:
    """``dst`` = ``data`` reduced over its last free axes with add, maximum, minimum or multiply."""
    instructions.check_last_axes(data, axis)
    instructions.reduce(dst, op, data, axis, negate=negate)


def tensor_tensor(dst: Tile, data1: Tile, data2: Tile, op: Any, engine: Any = None, name: str | None = None) -> None:
    """``dst = data1 op data2``; GpSimd computes on 32-bit integers in SBUF, exactly, unless ``engine`` is given."""
    exact = engine is None and are_wide_integers(dst, data1, data2)
    exact = exact and all(tile.space is Space.SBUF for tile in (dst, data1, data2))
    engine = engine or (Engine.GPSIMD if exact else Engine.VECTOR)
    instructions.tensor_tensor(dst, data1, data2, op, engine, exact=exact)


def tensor_scalar(
    dst: Tile, data: Tile, op0: Any, operand0: Any, reverse0: bool = False, op1: Any = None, operand1: Any = None,
    reverse1: bool = False, engine: Any = None, name: str | None = None,
) -> None:  # fmt: skip
    """``dst = (data op0 operand0) op1 operand1`` with per-partition operands, which must be float32 in this dialect."""
    instructions.require_float32(operand0, "operand0 of tensor_scalar")
    instructions.require_float32(operand1, "operand1 of tensor_scalar")
    engine = engine or Engine.VECTOR
    instructions.tensor_scalar(dst, data, op0, operand0, reverse0, op1, operand1, reverse1, engine)


def tensor_tensor_scan(
    dst: Tile, data0: Tile, data1: Tile, initial: Any, op0: Any, op1: Any, reverse0: bool = False,
    reverse1: bool = False, name: str | None = None,
) -> None:  # fmt: skip
    """The scan ``dst[t] = (data0[t] op0 dst[t-1]) op1 data1[t]``; the flags swap an operator's operands."""
    instructions.scan(dst, data0, data1, initial, op0, op1, reverse0, reverse1)


def tensor_copy(dst: Tile, src: Tile, engine: Any = None, name: str | None = None) -> None:
    """``dst = src`` on chip."""
    if (dst.shape[0], dst.elements) != (src.shape[0], src.elements):
        current().fail("shape", "source and destination of tensor_copy differ in shape", dst.shape, src.shape)
    instructions.copy(dst, src, engine or Engine.VECTOR)


def reciprocal(dst: Tile, data: Tile, name: str | None = None) -> None:
    """``dst = 1 / data`` on the vector engine."""
    instructions.check_equal_sizes("reciprocal", dst, data)
    engines.elementwise(Engine.VECTOR, "reciprocal", dst, (data,), np.reciprocal)


def memset(dst: Tile, value: float, engine: Any = None, name: str | None = None) -> None:
    """Fill ``dst`` with ``value``."""
    engines.memset(dst, value, engine or Engine.VECTOR)


def dma_copy(dst: Tile, src: Tile, name: str | None = None) -> None:
    """Move ``src`` to ``dst`` between HBM and SBUF."""
    engines.dma(dst, src)


def _pattern(dst: Tile, pattern: Sequence[Sequence[int]], offset: int, channel_multiplier: int) -> np.ndarray:
    """Return the integers of the affine pattern ``[[step, count], ...]`` of the free axes, in the shape of ``dst``."""
    counts, steps = tuple(n for _, n in pattern), tuple(step for step, _ in pattern)
    grid = Affine((dst.shape[0], *counts), (channel_multiplier, *steps), offset).values()
    if grid.size != dst.size:
        current().fail("shape", "the pattern and the result differ in size", dst.shape, grid.shape)
    return grid.reshape(dst.shape)


def iota(
    dst: Tile, pattern: Sequence[Sequence[int]], offset: int = 0, channel_multiplier: int = 0, name: str | None = None
) -> None:
    """Fill ``dst`` with ``offset + partition * channel_multiplier`` plus the integers of ``pattern``; on GpSimd."""
    selection.iota(dst, _pattern(dst, pattern, offset, channel_multiplier))


def affine_select(
    dst: Tile, pattern: Sequence[Sequence[int]], channel_multiplier: int, on_true_tile: Tile, on_false_value: float,
    cmp_op: Any = OPS["equal"], offset: int = 0, name: str | None = None,
) -> None:  # fmt: skip
    """``dst = on_true_tile`` where ``cmp_op(integer of the pattern, 0)`` holds, else the number; on GpSimd."""
    selected = as_op(cmp_op).function(_pattern(dst, pattern, offset, channel_multiplier), 0)
    selection.affine_select(dst, selected, on_true_tile, on_false_value)


def nc_stream_shuffle(dst: Tile, src: Tile, shuffle_mask: Sequence[int], name: str | None = None) -> None:
    """In each group of 32 partitions, ``dst[i] = src[shuffle_mask[i]]``; an entry 255 leaves ``dst[i]`` unchanged."""
    selection.shuffle(dst, src, shuffle_mask)


def tensor_copy_predicated(
    dst: Tile, src: Any, predicate: Tile, reverse_pred: bool = False, name: str | None = None
) -> None:
    """Overwrite ``dst`` with ``src`` where ``predicate`` is not 0 (``reverse_pred``: is 0)."""
    selection.copy_predicated(dst, src, predicate, reverse_pred)


def select_reduce(
    dst: Tile, predicate: Tile, on_true: Tile, on_false: Any, reduce_res: Tile | None = None, reduce_cmd: Any = None,
    reduce_op: Any = OPS["maximum"], reverse_pred: bool = False, name: str | None = None,
) -> None:  # fmt: skip
    """``dst = on_true`` where ``predicate`` is not 0, else ``on_false``; ``reduce_res`` receives the maximum."""
    if instructions.reduction_of(reduce_op)[0] != "maximum":
        current().fail("reduction", "a selection reduces with maximum only", "maximum", str(reduce_op))
    selection.select(dst, predicate, on_true, on_false, reduction_target(reduce_cmd, reduce_res), reverse_pred)


def scalar_tensor_tensor(
    dst: Tile, data: Tile, op0: Any, operand0: Any, op1: Any, operand1: Tile, reverse0: bool = False,
    reverse1: bool = False, name: str | None = None,
) -> None:  # fmt: skip
    """``dst = (data op0 operand0) op1 operand1``: a per-partition operand, then a tile."""
    instructions.scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0, reverse1)


def dma_transpose(dst: Tile, src: Tile, axes: Any = None, name: str | None = None) -> None:
    """``dst`` = ``src`` (2 to 4 axes, in HBM or SBUF) with its axes reversed; of 4, the middle two stay."""
    check_same(dst, src, "a transposing DMA")
    view = dma_transposed_view(src, axes)
    if dst.shape != view.shape:
        current().fail("shape", "the destination is not the transposed shape of the source", view.shape, dst.shape)
    engines.dma(dst, view)


def bn_stats(dst: Tile, data: Tile, name: str | None = None) -> None:
    """``dst`` [p, 6] = count, mean, count * variance of the even elements of each partition, then of the odd ones."""
    selection.bn_stats(dst, data)


def bn_aggr(dst: Tile, data: Tile, name: str | None = None) -> None:
    """``dst`` [p, 2] = mean and variance of each partition from results of :func:`bn_stats`."""
    selection.bn_aggr(dst, data)


def max8(dst: Tile, src: Tile, name: str | None = None) -> None:
    """``dst`` [p, 8] = the 8 largest elements of each partition in descending order."""
    selection.max8(dst, src)


def nc_find_index8(dst: Tile, data: Tile, vals: Tile, name: str | None = None) -> None:
    """``dst`` [p, 8] = the positions of the 8 ``vals`` of a partition in ``data``; equal ones advance."""
    selection.find_index8(dst, data, vals)


def nc_match_replace8(
    dst: Tile, data: Tile, vals: Tile, imm: float, dst_idx: Tile | None = None, name: str | None = None
) -> None:
    """``dst = data`` with the first match of each of ``vals`` replaced by ``imm``; ``dst_idx`` gets the positions."""
    selection.match_replace8(dst, data, vals, imm, dst_idx)
