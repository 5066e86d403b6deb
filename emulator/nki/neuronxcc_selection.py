"""``neuronxcc.nki.isa``, second part: instructions that select, move or summarise elements.

The conventions are those of :mod:`.neuronxcc_isa`; :mod:`.selection` has the rules and the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuronmm.emulator.nki import instructions, selection
from neuronmm.emulator.nki.dtypes import NAMES, as_dtype
from neuronmm.emulator.nki.index import Affine
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.neuronxcc_isa import as_last_result, reduction_target, tensor_copy
from neuronmm.emulator.nki.results import new_result
from neuronmm.emulator.nki.symbol import CombinedPredicate
from neuronmm.emulator.nki.tile import Tile
from neuronmm.emulator.nki.trace import Space

__all__ = [
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "iota",
    "max8",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_stream_shuffle",
    "range_select",
    "scalar_tensor_tensor",
    "select_reduce",
    "tensor_copy_predicated",
    "tensor_partition_reduce",
    "tensor_scalar_reduce",
]


def affine_select(pred: Any, on_true_tile: Tile, on_false_value: float, *, mask: Any = None, dtype: Any = None) -> Tile:
    """Return ``on_true_tile`` where the comparison ``pred`` of index grids holds, else the number; on GpSimd.

    GpSimd cannot access PSUM: a tile there is copied to SBUF first, as the compiler does for AWS's flash attention.
    """
    if isinstance(pred, CombinedPredicate):
        current().fail("predicate", "affine_select takes one comparison: use nl.where for masks combined by & or |")
    data = on_true_tile if on_true_tile.space is Space.SBUF else tensor_copy(on_true_tile)
    result = new_result(data.shape, dtype or data.dtype, mask=mask)
    selection.affine_select(result, np.broadcast_to(pred, data.shape), data, on_false_value, mask)
    return result


def iota(expr: Affine, dtype: Any, *, mask: Any = None) -> Tile:
    """Return the values of an index expression as constants in SBUF."""
    result = new_result(expr.shape, dtype, mask=mask)
    selection.iota(result, expr.values(), mask)
    return result


def nc_stream_shuffle(
    src: Tile, dst: Tile, shuffle_mask: Sequence[int], *, dtype: Any = None, mask: Any = None
) -> None:
    """In each group of 32 partitions, ``dst[i] = src[shuffle_mask[i]]``; an entry 255 leaves ``dst[i]`` unchanged."""
    if dtype is not None and as_dtype(dtype) != dst.dtype:
        current().fail("operand dtype", "a shuffle does not convert dtypes", dst.dtype.name, as_dtype(dtype).name)
    selection.shuffle(dst, src, shuffle_mask, mask)


def tensor_copy_predicated(
    *, src: Any, dst: Tile, predicate: Tile, reverse_pred: bool = False, mask: Any = None, dtype: Any = None
) -> None:
    """Overwrite ``dst`` with ``src`` where ``predicate`` is not 0 (``reverse_pred``: is 0)."""
    selection.copy_predicated(dst, src, predicate, reverse_pred, mask)


def select_reduce(
    *, dst: Tile, predicate: Tile, on_true: Tile, on_false: Any, reduce_res: Tile | None = None, reduce_cmd: Any = None,
    reduce_op: Any = None, reverse_pred: bool = False, mask: Any = None, dtype: Any = None,
) -> None:  # fmt: skip
    """``dst = on_true`` where ``predicate`` is not 0, else ``on_false``; ``reduce_res`` receives the maximum."""
    _only_maximum(reduce_op)
    selection.select(dst, predicate, on_true, on_false, reduction_target(reduce_cmd, reduce_res), reverse_pred, mask)


def range_select(
    *, on_true_tile: Tile, comp_op0: Any, comp_op1: Any, bound0: Tile, bound1: Tile, reduce_cmd: Any = None,
    reduce_res: Tile | None = None, reduce_op: Any = None, range_start: int = 0, on_false_value: float,
    mask: Any = None, dtype: Any = None,
) -> Tile:  # fmt: skip
    """Return ``on_true_tile`` where an element's number satisfies both bounds, else the number (NeuronCore-v3)."""
    _only_maximum(reduce_op)
    result = new_result(on_true_tile.shape, dtype or on_true_tile.dtype, mask=mask)
    selection.range_select(
        result, on_true_tile, comp_op0, comp_op1, bound0, bound1, range_start, on_false_value,
        reduction_target(reduce_cmd, reduce_res), mask,
    )  # fmt: skip
    return as_last_result(result)


def _only_maximum(op: Any) -> None:
    if op is not None and instructions.reduction_of(op)[0] != "maximum":
        current().fail("reduction", "a selection reduces with maximum only", "maximum", str(op))


def tensor_scalar_reduce(
    *, data: Tile, op0: Any, operand0: Any, reduce_op: Any, reduce_res: Tile, reverse0: bool = False, dtype: Any = None,
    mask: Any = None,
) -> Tile:  # fmt: skip
    """Return ``data op0 operand0``; ``reduce_res`` receives the result reduced over the free axes."""
    result = new_result(data.shape, dtype or data.dtype, mask=mask)
    instructions.tensor_scalar(
        result, data, op0, operand0, reverse0, mask=mask, reduce_res=reduce_res, reduce_op=reduce_op
    )
    return as_last_result(result)


def scalar_tensor_tensor(
    *, data: Tile, op0: Any, operand0: Any, op1: Any, operand1: Tile, reverse0: bool = False, reverse1: bool = False,
    dtype: Any = None, mask: Any = None,
) -> Tile:  # fmt: skip
    """Return ``(data op0 operand0) op1 operand1``: a per-partition operand, then a tile."""
    result = new_result(data.shape, dtype or data.dtype, mask=mask)
    instructions.scalar_tensor_tensor(result, data, op0, operand0, op1, operand1, reverse0, reverse1, mask)
    return result


def tensor_partition_reduce(op: Any, data: Tile, *, mask: Any = None, dtype: Any = None) -> Tile:
    """Return ``data`` reduced over its partitions [1, ...], on GpSimd."""
    result_mask = None if mask is None else np.any(np.broadcast_to(mask, data.shape), axis=0, keepdims=True)
    result = new_result((1, *data.shape[1:]), dtype or data.dtype, mask=result_mask)
    selection.partition_reduce(result, op, data, mask)
    return result


def bn_stats(data: Tile, *, mask: Any = None, dtype: Any = None) -> Tile:
    """Return [p, 6]: count, mean, count * variance of the even elements of each partition, then of the odd ones."""
    result = new_result((data.shape[0], 6), dtype or data.dtype, mask=selection.partition_mask(data, mask))
    selection.bn_stats(result, data, mask)
    return result


def bn_aggr(data: Tile, *, mask: Any = None, dtype: Any = None) -> Tile:
    """Return [p, 2]: mean and variance of each partition from results of :func:`bn_stats`."""
    result = new_result((data.shape[0], 2), dtype or data.dtype, mask=selection.partition_mask(data, mask))
    selection.bn_aggr(result, data, mask)
    return result


def max8(*, src: Tile, mask: Any = None, dtype: Any = None) -> Tile:
    """Return [p, 8]: the 8 largest elements of each partition in descending order."""
    result = new_result((src.shape[0], 8), dtype or src.dtype)
    selection.max8(result, src, mask)
    return result


def nc_find_index8(*, data: Tile, vals: Tile, mask: Any = None, dtype: Any = NAMES["uint32"]) -> Tile:
    """Return [p, 8]: the position of each of the 8 ``vals`` of a partition in ``data``; equal ones advance."""
    result = new_result((data.shape[0], 8), dtype)
    selection.find_index8(result, data, vals, mask)
    return result


def nc_match_replace8(
    *, data: Tile, vals: Tile, imm: float, dst_idx: Tile | None = None, mask: Any = None, dtype: Any = None
) -> Tile:
    """Return ``data`` with the first match of each of ``vals`` replaced by ``imm``; ``dst_idx`` gets the positions."""
    result = new_result(data.shape, dtype or data.dtype)
    selection.match_replace8(result, data, vals, imm, dst_idx, mask)
    return as_last_result(result)
