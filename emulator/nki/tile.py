"""Tiles: strided views of the memory of a kernel, with the rules of indexing and addressing.

Whatever a kernel indexes with (integers, slices, ``nl.ds``, index grids), the result is a strided view, so a tile is
an offset, a shape and a stride for each axis. Memory is partition-major: the partition axis has the largest stride.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from neuronmm.emulator.nki.dtypes import FLOAT32
from neuronmm.emulator.nki.index import Affine, ParDim
from neuronmm.emulator.nki.machine import Storage, current
from neuronmm.emulator.nki.symbol import number
from neuronmm.emulator.nki.trace import Region, Space

Mask = np.ndarray | None


class Tile:
    """A view of one allocation: of SBUF, of PSUM, or an HBM tensor.

    ``strides`` and ``offset`` count elements. ``partition`` is the axis that runs over partitions on chip.
    ``result`` is the number of the instruction that made the whole tile as its result, -1 for declared memory:
    assigning a result to a declared tile makes that instruction write there (under its ``mask``), with no copy.
    """

    __slots__ = ("_region", "beyond", "mask", "offset", "partition", "result", "shape", "storage", "strides", "terms")

    def __init__(
        self, storage: Storage, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, partition: int = 0
    ) -> None:
        self.storage, self.shape, self.strides, self.offset = storage, shape, strides, offset
        self.partition, self.result = partition, -1
        self.mask: Mask = None
        self._region: Region | None = None
        self.beyond: tuple[int, int, int] | None = None
        self.terms: tuple[tuple[int, Affine], ...] = ()

    @classmethod
    def of(cls, storage: Storage, partition: int = 0) -> Tile:
        """The whole of an allocation, partition-major."""
        shape = storage.record.shape
        strides = [0] * len(shape)
        step = 1
        for axis in [a for a in reversed(range(len(shape))) if a != partition] + [partition]:
            strides[axis] = step
            step *= shape[axis]
        return cls(storage, shape, tuple(strides), 0, partition)

    @property
    def dtype(self) -> np.dtype:
        return self.storage.dtype

    @property
    def space(self) -> Space:
        return self.storage.record.space

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def elements(self) -> int:
        """Elements a partition."""
        return prod(self.shape[1:])

    def __class_getitem__(cls, shape: Any) -> type[Tile]:
        """``tensor[128, 512]`` in a kernel is an annotation, without meaning here."""
        return cls

    # --- views -----------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Tile:
        keys = key if isinstance(key, tuple) else (key,)
        kinds = [type(k) for k in keys]
        if Tile in kinds:
            current().fail("unsupported", "indirect addressing, with indices in a tile, is not emulated")
        if Affine in kinds:
            return self._grid(keys)
        if type(Ellipsis) in kinds:
            at = next(i for i, k in enumerate(keys) if k is Ellipsis)
            fill = len(self.shape) - sum(k is not None and k is not Ellipsis for k in keys)
            keys = keys[:at] + (slice(None),) * fill + keys[at + 1 :]
        shape: list[int] = []
        strides: list[int] = []
        offset, axis, partition = self.offset, 0, self.partition
        beyond = None
        for k in keys:
            if k is None:
                shape.append(1)
                strides.append(0)
                continue
            if axis >= len(self.shape):
                current().fail("rank", f"too many indices for a tile of shape {self.shape}", len(self.shape), len(keys))
            n, stride = self.shape[axis], self.strides[axis]
            if isinstance(k, slice):
                start = 0 if k.start is None else number(k.start)
                stop = n if k.stop is None else number(k.stop)
                step = 1 if k.step is None else int(k.step)
                count = -(-(stop - start) // step)
                if start < 0 or count <= 0 or start + (count - 1) * step >= n:
                    beyond = (axis, stop - 1 if count > 0 else start, n)
            else:
                start, step, count = number(k), 1, 1
                if start < 0 or start >= n:
                    beyond = (axis, start, n)
            offset += start * stride
            if axis == self.partition:
                partition = len(shape)
            if isinstance(k, slice) or (axis == self.partition and self.space is not Space.HBM):
                shape.append(count)
                strides.append(stride * step)
            axis += 1
        shape += self.shape[axis:]
        strides += self.strides[axis:]
        if axis <= self.partition:
            partition = len(shape) - (len(self.shape) - self.partition)
        if len(shape) == 1 and self.space is not Space.HBM:  # a tile always has a partition and a free axis
            shape.append(1)
            strides.append(0)
        if beyond:
            current().fail(
                "out of bounds",
                f"index of axis {beyond[0]} leaves a tile of shape {self.shape}",
                beyond[2] - 1,
                beyond[1],
            )
        return Tile(self.storage, tuple(shape), tuple(strides), offset, partition)

    def _grid(self, keys: tuple) -> Tile:
        """Index with grids, one for each axis; integers may stand beside them, axes without an index come last."""
        machine, missing = current(), len(self.shape) - len(keys)
        for k in keys:
            if k is None or k is Ellipsis or isinstance(k, slice):
                machine.fail("mixed index", "an index holds a grid (nl.arange, nl.mgrid) and a slice: use one kind")
            if isinstance(k, Affine) and len(k.shape) == 1:
                machine.fail("1-D index", "a grid of one axis cannot index: write nl.arange(n)[:, None] or [None, :]")
        if missing < 0:
            machine.fail("rank", f"too many indices for a tile of shape {self.shape}", len(self.shape), len(keys))
        grids: list[Affine] = []
        for k in keys:
            grid = k if isinstance(k, Affine) else Affine((), (), number(k))
            grids.append(Affine(grid.shape + (1,) * missing, grid.steps + (0,) * missing, grid.offset))
        for axis, n in enumerate(self.shape[len(keys) :]):
            own = tuple(int(axis == a) for a in range(missing))
            grids.append(Affine(tuple(n if o else 1 for o in own), own))
        total = Affine((), (), self.offset)
        for grid, stride in zip(grids, self.strides, strict=True):
            total = total + grid * stride
        tile = Tile(self.storage, total.shape, total.steps, total.offset, 0)
        for axis, grid in enumerate(grids):
            low, high = grid.bounds()
            if low < 0 or high >= self.shape[axis]:
                tile.beyond = (axis, high if low >= 0 else low, self.shape[axis])
        tile.terms = tuple(zip(self.shape, grids, strict=True)) if tile.beyond else ()
        return tile

    def __setitem__(self, key: Any, value: Any) -> None:
        engines.assign(self[key], value)

    def reshape(self, *sizes: Any, shape: Any = None) -> Tile:
        """The same elements in another shape; the view must be contiguous (on chip: partition by partition)."""
        new = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes or tuple(shape)
        whole = Tile.of(self.storage, self.partition)
        if (self.shape, self.strides, self.offset) != (whole.shape, whole.strides, 0) or prod(new) != self.size:
            current().fail("reshape", f"cannot reshape a tile of shape {self.shape} to {new}")
        if self.space is not Space.HBM and new[0] != self.shape[0]:
            current().fail("reshape", f"reshaping {self.shape} to {new} would move partitions", self.shape[0], new[0])
        return Tile(self.storage, new, tuple(prod(new[i + 1 :]) for i in range(len(new))), 0, 0)

    def broadcast_to(self, shape: tuple[int, ...]) -> Tile:
        """Repeat axes of size 1; no memory is used."""
        strides = tuple(0 if m == 1 else s for m, s in zip(self.shape, self.strides, strict=True))
        np.broadcast_shapes(self.shape, shape)
        return Tile(self.storage, tuple(shape), strides, self.offset, self.partition)

    def permuted(self, axes: tuple[int, ...]) -> Tile:
        """The view with its axes in another order, for a DMA: on chip the partitions may come last."""
        view = Tile(self.storage, tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes), self.offset)
        view._region = self.region()
        return view

    def ap(self, pattern: list, offset: int = 0) -> Tile:
        """The access pattern ``[[step, count], ...]`` from element ``offset`` of an allocation, in elements."""
        shape, steps = tuple(count for _, count in pattern), tuple(step for step, _ in pattern)
        last = offset + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
        size = prod(self.storage.record.shape)
        if offset < 0 or last >= size or min(shape) < 1:
            current().fail(
                "out of bounds", f"access pattern {pattern} leaves a tensor of {size} elements", size - 1, last
            )
        return Tile(self.storage, shape, steps, offset, 0)

    # --- memory ----------------------------------------------------------------------------------------------------

    def region(self) -> Region:
        """The hull of the view in its buffer, in partitions and bytes."""
        if self._region is None:
            self._region = self._hbm_region() if self.space is Space.HBM else self._chip_region()
        return self._region

    def _hbm_region(self) -> Region:
        free, width = self.storage.free, self.storage.dtype.itemsize
        first, low = divmod(self.offset, free)
        last, high = first, low
        for n, stride in zip(self.shape, self.strides, strict=True):
            rows, rest = divmod((n - 1) * stride, free) if stride >= free else (0, (n - 1) * stride)
            last, high = last + rows, high + rest
        if high >= free:
            last, low, high = last + high // free, 0, free - 1
        return Region(self.storage.record.id, first, last + 1, low * width, (high + 1) * width)

    def _chip_region(self) -> Region:
        storage, shape, strides = self.storage, self.shape, self.strides
        free = storage.free
        first, low = divmod(self.offset, free)
        rows, rest = divmod((shape[0] - 1) * strides[0], free)
        high = low
        for axis in range(1, len(shape)):
            high += (shape[axis] - 1) * strides[axis]
        if rest or high >= free or self.partition != 0:
            current().fail("partition axis", f"the first axis of the view {shape} must be its tile's partitions")
        width = storage.dtype.itemsize
        return Region(storage.record.id, first, first + rows + 1, low * width, (high + 1) * width)

    def inside(self, mask: Mask) -> None:
        """Raise if the view, or the part of it under ``mask``, leaves its tensor."""
        if self.beyond is None:
            return
        axis, actual, limit = self.beyond
        if mask is not None:
            chosen = np.broadcast_to(mask, self.shape)
            bad = [
                (i, int(v.max()), n)
                for i, (n, grid) in enumerate(self.terms)
                for v in [grid.values(self.shape)[chosen]]
                if v.size and (v.min() < 0 or v.max() >= n)
            ]
            if not bad:
                return
            axis, actual, limit = bad[0]
        current().fail("out of bounds", f"index of axis {axis} leaves the tensor", limit - 1, actual)

    def _flat(self) -> np.ndarray:
        """Element numbers of the view."""
        return Affine(self.shape, self.strides, self.offset).values()

    def _view(self, array: np.ndarray) -> np.ndarray:
        width = array.itemsize
        steps = tuple([s * width for s in self.strides])
        return np.ndarray(self.shape, array.dtype, buffer=array, offset=self.offset * width, strides=steps)

    def read(self, mask: Mask = None, accumulating: bool = False) -> np.ndarray:
        """The values (under ``mask``; NaN elsewhere). ``accumulating`` marks the read of a read-modify-write."""
        machine, storage = current(), self.storage
        self.inside(mask)
        assert storage.data is not None
        chosen = None if mask is None else np.broadcast_to(np.asarray(mask), self.shape)
        if self.beyond is None or chosen is None:
            values = self._view(storage.data)
        else:
            values = np.where(chosen, storage.data[np.where(chosen, self._flat(), 0)].astype(np.float64), np.nan)
            values = values.astype(storage.dtype if storage.dtype.kind != "i" else np.float64)
        if machine.loops and not accumulating:
            races.note_read(self, chosen)
        return values

    def numbers(self, chosen: Mask) -> np.ndarray:
        """Element numbers of the view, or of the part under ``chosen``."""
        return self._flat() if chosen is None else self._flat()[chosen]

    def picked(self, array: np.ndarray, chosen: Mask) -> np.ndarray:
        """What ``array``, flat with one entry an element of the storage, has for this view or its part ``chosen``."""
        return self._view(array) if chosen is None else array[self.numbers(chosen)]

    def put(self, array: np.ndarray, values: Any, chosen: Mask) -> None:
        """The reverse of :meth:`picked`; ``values`` are those chosen, or one for all."""
        if chosen is None:
            self._view(array)[...] = values
        else:
            array[self.numbers(chosen)] = values

    def names_an_element_twice(self, mask: Mask) -> bool:
        """Whether two indices of the view (under ``mask``) are the same element."""
        reach = 0
        for stride, n in sorted((s, n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1):
            if stride <= reach:
                break
            reach += stride * (n - 1)
        else:
            return False
        if mask is None:
            return True
        chosen = self._flat()[np.broadcast_to(mask, self.shape)]
        return np.unique(chosen).size < chosen.size

    def write(self, values: Any, mask: Mask = None, accumulating: bool = False) -> None:
        """Store what the instruction emitted last computed, cast to the tile's dtype, under ``mask``."""
        machine, storage = current(), self.storage
        self.inside(mask)
        assert storage.data is not None
        chosen = None if mask is None else np.broadcast_to(mask, self.shape)
        if machine.loops:
            races.note_write(self, chosen, accumulating)
        with np.errstate(invalid="ignore", over="ignore"):
            cast = np.broadcast_to(np.asarray(values), self.shape).astype(storage.dtype, copy=False)
        self.put(storage.data, cast if chosen is None else cast[chosen], chosen)

    # --- operators (the language's infix form; one vector instruction each) -------------------------------------------

    def _binary(self, op: str, other: Any, reverse: bool = False) -> Tile:
        return OPS[op](other, self) if reverse else OPS[op](self, other)

    def __add__(self, other: Any) -> Tile:
        return self._binary("add", other)

    def __sub__(self, other: Any) -> Tile:
        return self._binary("subtract", other)

    def __mul__(self, other: Any) -> Tile:
        return self._binary("multiply", other)

    def __truediv__(self, other: Any) -> Tile:
        return self._binary("divide", other)

    def __radd__(self, other: Any) -> Tile:
        return self._binary("add", other, reverse=True)

    def __rsub__(self, other: Any) -> Tile:
        return self._binary("subtract", other, reverse=True)

    def __rmul__(self, other: Any) -> Tile:
        return self._binary("multiply", other, reverse=True)

    def __rtruediv__(self, other: Any) -> Tile:
        return self._binary("divide", other, reverse=True)

    def __iadd__(self, other: Any) -> Tile:
        engines.accumulate(self, other)
        return self

    def __repr__(self) -> str:
        return f"Tile({self.shape}, {self.dtype.name}, {self.space.value})"


def declare(shape: Any, dtype: np.dtype = FLOAT32, space: Space = Space.SBUF, name: str = "") -> Tile:
    """Allocate a tile or tensor of ``shape``.

    On chip the axis marked ``par_dim`` is the partition axis, else axis 0. HBM has no partitions: a tensor there is
    row-major wherever the mark is.
    """
    dims = tuple(shape) if not isinstance(shape, int) else (shape,)
    axis = 0 if space is Space.HBM else next((i for i, n in enumerate(dims) if isinstance(n, ParDim)), 0)
    storage = current().allocate(tuple(int(n) for n in dims), axis, dtype, space, name)
    return Tile.of(storage, axis)


# A tile's operators are instructions, and instructions work on tiles: these two come last.
from neuronmm.emulator.nki import engines, races  # noqa: E402
from neuronmm.emulator.nki.ops import OPS  # noqa: E402
