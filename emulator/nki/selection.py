"""Instructions that select, move or summarise elements, destination first, built on :mod:`.engines`.

Selections and shuffles, the top-8 instructions, means and variances, the reduction over partitions. Each raises
NkiError if an operand breaks a rule of the instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuronmm.emulator.nki.dtypes import FLOAT32
from neuronmm.emulator.nki.engines import elementwise
from neuronmm.emulator.nki.instructions import (
    check_column,
    check_equal_sizes,
    check_result_size,
    elementwise_and_reduce,
    reduction_of,
)
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.ops import as_op
from neuronmm.emulator.nki.tile import Mask, Tile
from neuronmm.emulator.nki.trace import Engine, Space
from neuronmm.emulator.nki.type_rules import (
    COPY_PREDICATES,
    INDICES,
    SELECT_PREDICATES,
    check_float,
    check_narrow,
    check_one_of,
    check_same,
)

_QUADRANT, _UNCHANGED = 32, 255
"""Partitions of one shuffle; the shuffle mask entry that leaves a partition as it is."""
_TOP8, _TOP8_MAX = 8, 16384
"""Elements per partition that a top-8 instruction finds, which are also the fewest that it accepts, and the most."""
_BN_STATS_MAX = 512
"""Elements per partition that ``bn_stats`` accepts."""


def _check_not_both_in_psum(predicate: Tile, data: Any) -> None:
    if isinstance(data, Tile) and data.space is predicate.space is Space.PSUM:
        current().fail("operand space", "data and predicate are both in psum", "one in sbuf", "psum, psum")


def copy_predicated(dst: Tile, src: Any, predicate: Tile, reverse: bool = False, mask: Mask = None) -> None:
    """Overwrite ``dst`` with ``src`` where ``predicate`` is not 0 (``reverse``: is 0).

    ``src`` is a number or a tile of the dtype of ``dst``.
    """
    check_equal_sizes("tensor_copy_predicated", dst, src, predicate)
    _check_not_both_in_psum(predicate, src)
    check_one_of(predicate, COPY_PREDICATES, "the predicate of tensor_copy_predicated")
    check_same(dst, src, "tensor_copy_predicated")
    elementwise(
        Engine.VECTOR, "tensor_copy_predicated", dst, (src, predicate, dst),
        lambda x, p, old: np.where((p != 0) != reverse, x, old), mask,
    )  # fmt: skip


def select(
    dst: Tile, predicate: Tile, on_true: Tile, on_false: Any, reduce_res: Tile | None = None, reverse: bool = False,
    mask: Mask = None,
) -> None:  # fmt: skip
    """``dst = on_true`` where ``predicate`` is not 0 (``reverse``: is 0), else ``on_false``, a number or a column.

    ``reduce_res`` receives the maximum of the result.
    """
    check_equal_sizes("select_reduce", dst, predicate, on_true)
    _check_not_both_in_psum(predicate, on_true)
    check_one_of(predicate, SELECT_PREDICATES, "the predicate of select_reduce")
    check_narrow(on_true, "on_true of select_reduce")
    check_float(reduce_res, "the maximum of select_reduce")
    check_column(on_false, on_true, "on_false")
    elementwise_and_reduce(
        Engine.VECTOR, "select_reduce", dst, (on_true, predicate, on_false),
        lambda x, p, y: np.where((p != 0) != reverse, x, y), mask, reduce_res, "maximum",
    )  # fmt: skip


def range_select(
    dst: Tile, data: Tile, op0: Any, op1: Any, bound0: Tile, bound1: Tile, start: int, on_false: float,
    reduce_res: Tile | None, mask: Mask = None,
) -> None:  # fmt: skip
    """``dst = data`` where ``(i op0 bound0) and (i op1 bound1)``, else ``on_false``; NeuronCore-v3 and later.

    ``i`` is ``start`` plus the number of the element in its partition. ``reduce_res`` receives the maximum.
    """
    machine, first, second = current(), as_op(op0).function, as_op(op1).function
    if machine.core.name == "v2":
        machine.fail("engine", "NeuronCore-v2 has no range_select", "NeuronCore-v3", "NeuronCore-v2")
    check_float(data, "the data of range_select")
    for bound in (bound0, bound1):
        check_column(bound, data, "a bound")
        if bound.dtype != FLOAT32:
            machine.fail("operand dtype", "a bound of range_select must be float32", "float32", bound.dtype.name)
    position = start + np.arange(data.elements).reshape(data.shape[1:])

    def function(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return np.where(first(position, low) & second(position, high), x, np.float32(on_false))

    elementwise_and_reduce(
        Engine.VECTOR, "range_select", dst, (data, bound0, bound1), function, mask, reduce_res, "maximum"
    )


def affine_select(dst: Tile, predicate: np.ndarray, data: Tile, on_false: float, mask: Mask = None) -> None:
    """``dst = data`` where ``predicate``, a boolean array of its shape, is true, else ``on_false``; on GpSimd."""
    check_equal_sizes("affine_select", dst, data)
    check_narrow(data, "on_true_tile of affine_select")
    check_narrow(dst, "the result of affine_select")
    elementwise(
        Engine.GPSIMD, "affine_select", dst, (data,), lambda x: np.where(predicate, x, np.float32(on_false)), mask
    )


def iota(dst: Tile, values: np.ndarray, mask: Mask = None) -> None:
    """Fill ``dst`` with the constants ``values``, an array of its size, on GpSimd."""
    elementwise(Engine.GPSIMD, "iota", dst, (), lambda: values.reshape(dst.shape), mask)


def shuffle(dst: Tile, src: Tile, order: Sequence[int], mask: Mask = None) -> None:
    """In each group of 32 partitions, ``dst[i] = src[order[i]]``; ``order[i]`` 255 leaves ``dst[i]`` unchanged."""
    machine = current()
    sources = [int(i) for i in order]
    if len(sources) != _QUADRANT or any(i != _UNCHANGED and not 0 <= i < _QUADRANT for i in sources):
        machine.fail("shuffle mask", "a shuffle mask has 32 entries from 0 to 31, or 255", _QUADRANT, sources)
    check_same(dst, src, "a shuffle")
    if dst.elements != src.elements:
        machine.fail("shape", "source and destination of a shuffle differ in size", src.elements, dst.elements)
    partitions = np.arange(dst.shape[0])
    entries = np.array(sources)[partitions % _QUADRANT]
    moves = entries != _UNCHANGED
    quadrants = partitions // _QUADRANT * _QUADRANT if src.shape[0] > _QUADRANT else 0
    origins = quadrants + np.where(moves, entries, 0)
    if (origins[moves] >= src.shape[0]).any():
        machine.fail("shuffle mask", "a shuffle reads beyond its source", src.shape[0] - 1, int(origins[moves].max()))
    dst_mask = np.broadcast_to(moves.reshape(-1, *(1,) * (dst.ndim - 1)), dst.shape)
    dst_mask = dst_mask if mask is None else dst_mask & np.broadcast_to(mask, dst.shape)
    elementwise(
        Engine.VECTOR, "nc_stream_shuffle", dst, (src,), lambda x: x[np.where(moves, origins, 0)].reshape(dst.shape),
        source_shape=src.shape, dst_mask=dst_mask, broadcast=False,
    )  # fmt: skip


def _check_top8(data: Tile, mask: Mask, values: Tile | None = None) -> None:
    """Check the operands of a top-8 instruction; ``values`` are those that it searches."""
    machine = current()
    if not _TOP8 <= data.elements <= _TOP8_MAX:
        machine.fail("free size", "a top-8 instruction takes 8 to 16384 elements", (_TOP8, _TOP8_MAX), data.elements)
    if values is not None and (values.shape[0], values.elements) != (data.shape[0], _TOP8):
        machine.fail("shape", "a top-8 instruction takes 8 values per partition", (data.shape[0], _TOP8), values.shape)
    if mask is not None:
        machine.fail("unsupported", "the emulator does not mask the top-8 instructions: slice the operands")


def max8(dst: Tile, data: Tile, mask: Mask = None) -> None:
    """``dst`` [p, 8] = the 8 largest elements of each partition, in descending order."""
    _check_top8(data, mask)
    check_result_size("max8", dst, data.shape[0], _TOP8)
    elementwise(
        Engine.VECTOR, "max8", dst, (data,), lambda x: np.sort(x.reshape(len(x), -1), axis=1)[:, :-9:-1],
        source_shape=data.shape,
    )  # fmt: skip


_MISSING = -1
"""The position of a searched value that is not in the data; stored, all bits of an index are ones."""


def _positions(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return, per partition of ``x``, the position of each of its ``values``, int64 [partitions, 8].

    Equal values get successive positions.
    """
    rows, searched = x.reshape(len(x), -1), values.reshape(len(x), -1)
    positions = np.full(searched.shape, _MISSING, np.int64)
    for row, wanted, found in zip(rows, searched, positions, strict=True):
        for value in np.unique(wanted):
            matches, slots = np.flatnonzero(row == value), np.flatnonzero(wanted == value)
            count = min(len(matches), len(slots))
            found[slots[:count]] = matches[:count]
    return positions


def find_index8(dst: Tile, data: Tile, values: Tile, mask: Mask = None) -> None:
    """``dst`` [p, 8] = the position of each of the 8 ``values`` of a partition in ``data``; all ones if it has none."""
    _check_top8(data, mask, values)
    check_result_size("nc_find_index8", dst, data.shape[0], _TOP8)
    check_one_of(dst, INDICES, "the result of nc_find_index8")
    elementwise(
        Engine.VECTOR, "nc_find_index8", dst, (data, values),
        lambda x, v: _positions(x, v).astype(dst.dtype).reshape(dst.shape), source_shape=data.shape, broadcast=False,
    )  # fmt: skip


def match_replace8(
    dst: Tile, data: Tile, values: Tile, new: float, positions: Tile | None = None, mask: Mask = None
) -> None:
    """``dst = data`` with the first match of each of the 8 ``values`` replaced by ``new``.

    ``positions`` [p, 8] receives the positions of the matches. The instruction begins with the last value, so of equal
    values the last one has the first position.
    """
    _check_top8(data, mask, values)
    check_result_size("nc_match_replace8", dst, data.shape[0], data.elements)
    if positions is not None:
        check_result_size("nc_match_replace8", positions, data.shape[0], _TOP8)
        check_one_of(positions, INDICES, "the positions of nc_match_replace8")

    def matches(x: np.ndarray, v: np.ndarray) -> np.ndarray:
        found = _positions(x, v.reshape(len(v), -1)[:, ::-1])[:, ::-1]
        if (found == _MISSING).any():
            current().fail("operand", "a searched value is not in the data: the hardware's result is undefined")
        return found

    def replaced(x: np.ndarray, v: np.ndarray) -> np.ndarray:
        rows = x.reshape(len(x), -1).copy()
        np.put_along_axis(rows, matches(x, v), np.float32(new), axis=1)
        return rows.reshape(dst.shape)

    if positions is not None:
        elementwise(
            Engine.VECTOR, "nc_match_replace8", positions, (data, values),
            lambda x, v: matches(x, v).reshape(positions.shape), source_shape=data.shape, broadcast=False,
        )  # fmt: skip
    elementwise(
        Engine.VECTOR, "nc_match_replace8", dst, (data, values), replaced, source_shape=data.shape, broadcast=False
    )  # fmt: skip


def partition_mask(data: Tile, mask: Mask) -> Mask:
    """Return ``mask`` as [partitions, 1]; raise NkiError if it selects only a part of a partition."""
    if mask is None:
        return None
    rows = np.broadcast_to(mask, data.shape).reshape(data.shape[0], -1)
    if (rows.any(axis=1) != rows.all(axis=1)).any():
        current().fail("unsupported", "the emulator does not mask statistics along the free axes: slice the operand")
    return rows[:, :1]


def bn_stats(dst: Tile, data: Tile, mask: Mask = None) -> None:
    """``dst`` [p, 6] = count, mean and count * variance of the even elements of a partition, then of the odd ones."""
    if data.elements > _BN_STATS_MAX:
        current().fail("free size", "bn_stats has a limit of elements per partition", _BN_STATS_MAX, data.elements)
    check_result_size("bn_stats", dst, data.shape[0], 6)

    def function(x: np.ndarray) -> np.ndarray:
        rows, result = x.reshape(len(x), -1), []
        for part in (rows[:, 0::2], rows[:, 1::2]):
            count = np.full(len(x), part.shape[1], np.float32)
            mean = part.mean(axis=1) if part.shape[1] else np.zeros(len(x), np.float32)
            result += [count, mean, np.square(part - mean[:, None]).sum(axis=1)]
        return np.stack(result, axis=1).reshape(dst.shape)

    elementwise(
        Engine.VECTOR, "bn_stats", dst, (data,), function, mask, data.shape, dst_mask=partition_mask(data, mask)
    )  # fmt: skip


def bn_aggr(dst: Tile, data: Tile, mask: Mask = None) -> None:
    """``dst`` [p, 2] = mean and variance of a partition from its ``(count, mean, count * variance)`` triples."""
    if data.elements % 3:
        current().fail("shape", "bn_aggr takes triples of elements", "a multiple of 3", data.elements)
    check_result_size("bn_aggr", dst, data.shape[0], 2)

    def function(x: np.ndarray) -> np.ndarray:
        count, mean, scaled_variance = np.moveaxis(x.reshape(len(x), -1, 3), 2, 0)
        total = count.sum(axis=1)
        center = (count * mean).sum(axis=1) / total
        squares = (scaled_variance + count * np.square(mean - center[:, None])).sum(axis=1)
        return np.stack([center, squares / total], axis=1).reshape(dst.shape)

    elementwise(
        Engine.VECTOR, "bn_aggr", dst, (data,), function, mask, data.shape, dst_mask=partition_mask(data, mask)
    )  # fmt: skip


def partition_reduce(dst: Tile, op: Any, data: Tile, mask: Mask = None) -> None:
    """``dst`` [1, ...] = ``data`` reduced over its partitions with add or maximum, on GpSimd."""
    machine = current()
    name, reducer, neutral = reduction_of(op)
    if name not in ("add", "maximum"):
        machine.fail("reduction", f"GpSimd does not reduce partitions with {name}", "add, maximum", name)
    check_result_size("tensor_partition_reduce", dst, 1, data.elements)

    def function(x: np.ndarray) -> np.ndarray:
        selected = x if mask is None else np.where(mask, x, np.float32(neutral))
        return reducer(selected, axis=0).reshape(dst.shape)

    dst_mask = None if mask is None else np.any(np.broadcast_to(mask, data.shape), axis=0, keepdims=True)
    elementwise(
        Engine.GPSIMD, "tensor_partition_reduce", dst, (data,), function, mask, data.shape, dst_mask=dst_mask
    )  # fmt: skip
