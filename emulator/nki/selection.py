"""Instructions that choose elements or move them between partitions, in destination-passing form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuronmm.emulator.nki.dtypes import FLOAT32, NAMES
from neuronmm.emulator.nki.engines import elementwise
from neuronmm.emulator.nki.instructions import column, reducing
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.ops import as_op
from neuronmm.emulator.nki.tile import Mask, Tile
from neuronmm.emulator.nki.trace import Engine, Space

_PREDICATES = frozenset(NAMES[n] for n in ("bool_", "uint8", "uint16", "uint32", "int8", "int16"))
_QUADRANT, _KEEP = 32, 255
_FEWEST, _MOST = 8, 16384
"""Elements a partition that the top-8 instructions take."""


def _check_predicate(predicate: Tile, data: Any) -> None:
    machine = current()
    if predicate.dtype not in _PREDICATES:
        machine.fail("operand dtype", "a predicate is of an integer type", "uint8, uint16 ...", predicate.dtype.name)
    if isinstance(data, Tile) and data.space is predicate.space is Space.PSUM:
        machine.fail("operand space", "data and predicate both lie in psum", "one in sbuf", "psum, psum")


def copy_predicated(dst: Tile, src: Any, predicate: Tile, reverse: bool = False, mask: Mask = None) -> None:
    """Overwrite ``dst`` with ``src``, a tile of its dtype or a number, where ``predicate`` is not 0, or is 0."""
    _check_predicate(predicate, src)
    if isinstance(src, Tile) and src.dtype != dst.dtype:
        current().fail("operand dtype", "source and destination differ in dtype", dst.dtype.name, src.dtype.name)
    elementwise(
        Engine.VECTOR, "tensor_copy_predicated", dst, (src, predicate, dst),
        lambda x, p, old: np.where((p != 0) != reverse, x, old), mask,
    )  # fmt: skip


def select(
    dst: Tile, predicate: Tile, on_true: Tile, on_false: Any, reduced: Tile | None = None, reverse: bool = False,
    mask: Mask = None,
) -> None:  # fmt: skip
    """``dst = on_true`` where ``predicate`` is not 0, else ``on_false``, a number or a column."""
    _check_predicate(predicate, on_true)
    column(on_false, on_true, "on_false")
    reducing(
        Engine.VECTOR, "select_reduce", dst, (on_true, predicate, on_false),
        lambda x, p, y: np.where((p != 0) != reverse, x, y), mask, reduced, "maximum",
    )  # fmt: skip


def range_select(
    dst: Tile, data: Tile, op0: Any, op1: Any, bound0: Tile, bound1: Tile, start: int, on_false: float,
    reduced: Tile | None, mask: Mask = None,
) -> None:  # fmt: skip
    """``dst = data`` where ``start`` plus an element's number compares so with both bounds, else ``on_false``."""
    machine, first, second = current(), as_op(op0).function, as_op(op1).function
    if machine.core.name == "v2":
        machine.fail("engine", "NeuronCore-v2 has no range_select", "NeuronCore-v3", "NeuronCore-v2")
    for bound in (bound0, bound1):
        column(bound, data, "a bound")
        if bound.dtype != FLOAT32:
            machine.fail("operand dtype", "a bound of range_select must be float32", "float32", bound.dtype.name)
    place = start + np.arange(data.elements).reshape(data.shape[1:])

    def function(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return np.where(first(place, low) & second(place, high), x, np.float32(on_false))

    reducing(Engine.VECTOR, "range_select", dst, (data, bound0, bound1), function, mask, reduced, "maximum")


def affine_select(dst: Tile, predicate: np.ndarray, data: Tile, on_false: float, mask: Mask = None) -> None:
    """``dst = data`` where the boolean array ``predicate`` of its shape is true, else ``on_false``; on GpSimd."""
    elementwise(
        Engine.GPSIMD, "affine_select", dst, (data,), lambda x: np.where(predicate, x, np.float32(on_false)), mask
    )


def iota(dst: Tile, values: np.ndarray, mask: Mask = None) -> None:
    """Fill ``dst`` with constants, an array of its size, on GpSimd."""
    elementwise(Engine.GPSIMD, "iota", dst, (), lambda: values.reshape(dst.shape), mask)


def shuffle(dst: Tile, src: Tile, order: Sequence[int], mask: Mask = None) -> None:
    """In each 32 partitions: ``dst[i] = src[order[i]]``; where ``order[i]`` is 255, ``dst[i]`` stays as it is."""
    machine = current()
    sources = [int(i) for i in order]
    if len(sources) != _QUADRANT or any(i != _KEEP and not 0 <= i < _QUADRANT for i in sources):
        machine.fail("shuffle mask", "a shuffle takes 32 partition numbers of 0 to 31, or 255", _QUADRANT, sources)
    if (dst.dtype, dst.elements) != (src.dtype, src.elements):
        machine.fail("shape", "source and destination of a shuffle differ", (src.dtype.name, src.elements), dst)
    places = np.arange(dst.shape[0])
    within = np.array(sources)[places % _QUADRANT]
    moves = within != _KEEP
    come = (places // _QUADRANT * _QUADRANT if src.shape[0] > _QUADRANT else 0) + np.where(moves, within, 0)
    if (come[moves] >= src.shape[0]).any():
        machine.fail("shuffle mask", "a shuffle reads beyond its source", src.shape[0] - 1, int(come[moves].max()))
    kept = np.broadcast_to(moves.reshape(-1, *(1,) * (dst.ndim - 1)), dst.shape)
    kept = kept if mask is None else kept & np.broadcast_to(mask, dst.shape)
    elementwise(
        Engine.VECTOR, "nc_stream_shuffle", dst, (src,), lambda x: x[np.where(moves, come, 0)].reshape(dst.shape),
        shape=src.shape, kept=kept, aligned=False,
    )  # fmt: skip


def _check_top8(data: Tile, mask: Mask) -> None:
    machine = current()
    if not _FEWEST <= data.elements <= _MOST:
        machine.fail("free size", "a top-8 instruction takes so many elements", (_FEWEST, _MOST), data.elements)
    if mask is not None:
        machine.fail("unsupported", "the emulator does not mask the top-8 instructions: slice the operands")


def max8(dst: Tile, data: Tile, mask: Mask = None) -> None:
    """The 8 largest elements of each partition, the largest first."""
    _check_top8(data, mask)
    elementwise(
        Engine.VECTOR, "max8", dst, (data,), lambda x: np.sort(x.reshape(len(x), -1), axis=1)[:, :-9:-1],
        shape=data.shape,
    )  # fmt: skip


def _places(x: np.ndarray, wanted: np.ndarray, replace: np.float32 | None = None) -> np.ndarray:
    """Where each partition first has each wanted value; ``replace`` overwrites it before the next is sought."""
    found = np.zeros(wanted.shape, np.int64)
    for row, values, at in zip(x, wanted, found, strict=True):
        for i, value in enumerate(values):
            hits = np.flatnonzero(row == value)
            if not hits.size:
                current().fail("operand", "a value sought is not in the data: what the hardware gives is undefined")
            at[i] = hits[0]
            if replace is not None:
                row[hits[0]] = replace
    return found


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1).copy()


def find_index8(dst: Tile, data: Tile, values: Tile, mask: Mask = None) -> None:
    """The first places in each partition of ``data`` of its 8 ``values``."""
    _check_top8(data, mask)
    elementwise(
        Engine.VECTOR, "nc_find_index8", dst, (data, values),
        lambda x, v: _places(_rows(x), _rows(v)).reshape(dst.shape), shape=data.shape, aligned=False,
    )  # fmt: skip


def match_replace8(
    dst: Tile, data: Tile, values: Tile, new: float, places: Tile | None = None, mask: Mask = None
) -> None:
    """``dst = data`` with the first match of each of the 8 ``values`` replaced; ``places`` receives where they were."""
    _check_top8(data, mask)

    def replaced(x: np.ndarray, v: np.ndarray) -> np.ndarray:
        rows = _rows(x)
        _places(rows, _rows(v), np.float32(new))
        return rows.reshape(dst.shape)

    if places is not None:
        elementwise(
            Engine.VECTOR, "nc_match_replace8", places, (data, values),
            lambda x, v: _places(_rows(x), _rows(v), np.float32(new)).reshape(places.shape), shape=data.shape,
            aligned=False,
        )  # fmt: skip
    elementwise(
        Engine.VECTOR, "nc_match_replace8", dst, (data, values), replaced, shape=data.shape, aligned=False
    )  # fmt: skip
