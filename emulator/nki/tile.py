"""Tiles: strided views of the memory of a kernel, with the rules of indexing and addressing.

Every index of a kernel (integers, slices, ``nl.ds``, index grids) gives a strided view, so a tile is an offset, a shape
and one stride per axis. Memory is partition-major: the partition axis has the largest stride.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from neuronmm.emulator.nki.dtypes import FLOAT32, stored
from neuronmm.emulator.nki.index import Affine, ParDim, View, index_view
from neuronmm.emulator.nki.machine import Storage, current
from neuronmm.emulator.nki.symbol import number
from neuronmm.emulator.nki.trace import Region, Space

Mask = np.ndarray | None


class Tile:
    """A view of one allocation: of SBUF, of PSUM, or an HBM tensor.

    ``strides`` and ``offset`` count elements. ``partition`` is the axis that runs over partitions on chip.
    ``producer`` is the number of the instruction that has the whole tile as its result (under ``mask``), -1 for
    declared memory. ``overrun`` is (axis, index, size) if the view leaves its tensor; only a mask makes that legal,
    and ``axis_indices`` then has (size, index grid) per axis to check it.
    """

    __slots__ = (
        "_region",
        "axis_indices",
        "mask",
        "offset",
        "overrun",
        "partition",
        "producer",
        "shape",
        "storage",
        "strides",
    )

    def __init__(
        self, storage: Storage, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, partition: int = 0
    ) -> None:
        self.storage, self.shape, self.strides, self.offset = storage, shape, strides, offset
        self.partition, self.producer = partition, -1
        self.mask: Mask = None
        self._region: Region | None = None
        self.overrun: tuple[int, int, int] | None = None
        self.axis_indices: tuple[tuple[int, Affine], ...] = ()

    @classmethod
    def of(cls, storage: Storage, partition: int = 0) -> Tile:
        """Return the view of a whole allocation, partition-major."""
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
        """Elements per partition."""
        return prod(self.shape[1:])

    def __class_getitem__(cls, shape: Any) -> type[Tile]:
        """Accept the annotation ``tensor[128, 512]`` of a kernel; it has no effect."""
        return cls

    # --- views -----------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Tile:
        keys = key if isinstance(key, tuple) else (key,)
        kinds = [type(k) for k in keys]
        if Tile in kinds:
            current().fail("unsupported", "indirect addressing, with indices in a tile, is not emulated")
        if Affine in kinds:
            return self._index_by_grids(keys)
        view = index_view(
            View(self.shape, self.strides, self.offset, self.partition), keys, on_chip=self.space is not Space.HBM
        )
        return Tile(self.storage, *view)

    def _index_by_grids(self, keys: tuple) -> Tile:
        """Index with one grid or integer per axis; axes without an index are appended whole."""
        machine, missing = current(), len(self.shape) - len(keys)
        for k in keys:
            if k is None or k is Ellipsis or isinstance(k, slice):
                machine.fail("mixed index", "an index mixes grids (nl.arange, nl.mgrid) and slices: use one kind")
            if isinstance(k, Affine) and len(k.shape) == 1:
                machine.fail("1-D index", "a grid of one axis cannot index: write nl.arange(n)[:, None] or [None, :]")
        if missing < 0:
            machine.fail("rank", f"too many indices for a tile of shape {self.shape}", len(self.shape), len(keys))
        grids: list[Affine] = []
        for k in keys:
            grid = k if isinstance(k, Affine) else Affine((), (), number(k))
            grids.append(Affine(grid.shape + (1,) * missing, grid.steps + (0,) * missing, grid.offset))
        for axis, n in enumerate(self.shape[len(keys) :]):
            steps = tuple(int(axis == a) for a in range(missing))
            grids.append(Affine(tuple(n if step else 1 for step in steps), steps))
        total = Affine((), (), self.offset)
        for grid, stride in zip(grids, self.strides, strict=True):
            total = total + grid * stride
        tile = Tile(self.storage, total.shape, total.steps, total.offset, 0)
        for axis, grid in enumerate(grids):
            low, high = grid.bounds()
            if low < 0 or high >= self.shape[axis]:
                tile.overrun = (axis, high if low >= 0 else low, self.shape[axis])
        tile.axis_indices = tuple(zip(self.shape, grids, strict=True)) if tile.overrun else ()
        return tile

    def __setitem__(self, key: Any, value: Any) -> None:
        results.assign(self[key], value)

    def reshape(self, *sizes: Any, shape: Any = None) -> Tile:
        """Return the same elements in another shape.

        Raises:
            NkiError: the view is not a whole allocation, the sizes differ, or, on chip, the partitions would change.
        """
        new = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes or tuple(shape)
        allocation = Tile.of(self.storage, self.partition)
        is_whole = (self.shape, self.strides, self.offset) == (allocation.shape, allocation.strides, 0)
        if not is_whole or prod(new) != self.size:
            current().fail("reshape", f"cannot reshape a tile of shape {self.shape} to {new}")
        if self.space is not Space.HBM and new[0] != self.shape[0]:
            current().fail("reshape", f"reshaping {self.shape} to {new} would move partitions", self.shape[0], new[0])
        return Tile(self.storage, new, tuple(prod(new[i + 1 :]) for i in range(len(new))), 0, 0)

    def broadcast_to(self, shape: tuple[int, ...]) -> Tile:
        """Return a view that repeats the axes of size 1.

        Raises:
            NkiError: the shape has another number of axes, or changes an axis of another size.
        """
        if len(shape) != self.ndim or any(m not in (1, n) for m, n in zip(self.shape, shape, strict=True)):
            current().fail("shape", "a tile repeats only axes of size 1", self.shape, tuple(shape))
        strides = tuple(0 if m == 1 else s for m, s in zip(self.shape, self.strides, strict=True))
        return Tile(self.storage, tuple(shape), strides, self.offset, self.partition)

    def permute(self, axes: tuple[int, ...]) -> Tile:
        """Return the view with its axes reordered, for a DMA: on chip the partitions may be any axis."""
        view = Tile(self.storage, tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes), self.offset)
        view._region = self.region()
        return view

    def ap(self, pattern: list, offset: int = 0) -> Tile:
        """Return the access pattern ``[[step, count], ...]`` from element ``offset`` of the allocation, in elements.

        Raises:
            NkiError: the pattern leaves the tensor.
        """
        shape, steps = tuple(count for _, count in pattern), tuple(step for step, _ in pattern)
        spans = [(n - 1) * s for n, s in zip(shape, steps, strict=True)]
        first, last = (offset + sum(part for part in spans if (part > 0) == up) for up in (False, True))
        size = prod(self.storage.record.shape)
        if first < 0 or last >= size or min(shape) < 1:
            message = f"access pattern {pattern} leaves a tensor of {size} elements"
            current().fail("out of bounds", message, size - 1, first if first < 0 else last)
        return Tile(self.storage, shape, steps, offset, 0)

    # --- memory ----------------------------------------------------------------------------------------------------

    def region(self) -> Region:
        """Return the bounding region of the view in its buffer."""
        if self._region is None:
            self._region = self._hbm_region() if self.space is Space.HBM else self._chip_region()
        return self._region

    def _hbm_region(self) -> Region:
        free, width = self.storage.free_size, self.storage.dtype.itemsize
        first, low = divmod(self.offset, free)
        last, high = first, low
        for n, stride in zip(self.shape, self.strides, strict=True):
            span = (n - 1) * abs(stride)
            rows, columns = divmod(span, free) if abs(stride) >= free else (0, span)
            if stride < 0:
                first, low = first - rows, low - columns
            else:
                last, high = last + rows, high + columns
        if low < 0 or high >= free:
            first, last, low, high = first + low // free, last + high // free, 0, free - 1
        return Region(self.storage.record.id, first, last + 1, low * width, (high + 1) * width)

    def _chip_region(self) -> Region:
        storage, shape, strides = self.storage, self.shape, self.strides
        free = storage.free_size
        first, low = divmod(self.offset, free)
        rows, remainder = divmod((shape[0] - 1) * strides[0], free)
        spans = [(n - 1) * stride for n, stride in zip(shape[1:], strides[1:], strict=True)]
        high = low + sum(span for span in spans if span > 0)
        low += sum(span for span in spans if span < 0)
        if remainder or low < 0 or high >= free or self.partition != 0:
            current().fail(
                "partition axis", f"the first axis of the view {shape} must be the partition axis of its tile"
            )
        width = storage.dtype.itemsize
        first, last = min(first, first + rows), max(first, first + rows)
        return Region(storage.record.id, first, last + 1, low * width, (high + 1) * width)

    def check_bounds(self, mask: Mask) -> None:
        """Raise NkiError if the view, or its part under ``mask``, leaves its tensor."""
        if self.overrun is None:
            return
        axis, actual, limit = self.overrun
        if mask is not None:
            selected = np.broadcast_to(mask, self.shape)
            violations = [
                (i, int(v.max()), n)
                for i, (n, grid) in enumerate(self.axis_indices)
                for v in [grid.values(self.shape)[selected]]
                if v.size and (v.min() < 0 or v.max() >= n)
            ]
            if not violations:
                return
            axis, actual, limit = violations[0]
        current().fail("out of bounds", f"index of axis {axis} leaves the tensor", limit - 1, actual)

    def _flat(self) -> np.ndarray:
        """Return the numbers of the view's elements in the allocation."""
        return Affine(self.shape, self.strides, self.offset).values()

    def _view(self, array: np.ndarray) -> np.ndarray:
        width = array.itemsize
        steps = tuple([s * width for s in self.strides])
        return np.ndarray(self.shape, array.dtype, buffer=array, offset=self.offset * width, strides=steps)

    def read(self, mask: Mask = None, accumulating: bool = False) -> np.ndarray:
        """Return the values (under ``mask``; elsewhere undefined); ``accumulating``: the read is part of a sum.

        Raises:
            NkiError: the view leaves its tensor, or an ``affine_range`` iteration reads what another wrote.
        """
        machine, storage = current(), self.storage
        self.check_bounds(mask)
        assert storage.data is not None
        selected = None if mask is None else np.broadcast_to(np.asarray(mask), self.shape)
        if self.overrun is None or selected is None:
            values = self._view(storage.data)
        else:
            values = np.where(selected, storage.data[np.where(selected, self._flat(), 0)].astype(np.float64), np.nan)
            values = values.astype(storage.dtype if storage.dtype.kind != "i" else np.float64)
        if machine.loops and not accumulating:
            races.note_read(self, selected)
        return values

    def element_numbers(self, mask: Mask) -> np.ndarray:
        """Return the element numbers of the view, or of its part under ``mask``."""
        return self._flat() if mask is None else self._flat()[mask]

    def gather(self, array: np.ndarray, mask: Mask) -> np.ndarray:
        """Return the entries of ``array`` (flat, one per element of the allocation) for the view (under ``mask``)."""
        return self._view(array) if mask is None else array[self.element_numbers(mask)]

    def scatter(self, array: np.ndarray, values: Any, mask: Mask) -> None:
        """Set what :meth:`gather` returns; ``values`` is one number, or one per selected element."""
        if mask is None:
            self._view(array)[...] = values
        else:
            array[self.element_numbers(mask)] = values

    def repeats_elements(self, mask: Mask) -> bool:
        """Return whether two indices of the view (under ``mask``) are the same element."""
        reach = 0
        for stride, n in sorted((abs(s), n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1):
            if stride <= reach:
                break
            reach += stride * (n - 1)
        else:
            return False
        if mask is None:
            return True
        elements = self._flat()[np.broadcast_to(mask, self.shape)]
        return np.unique(elements).size < elements.size

    def write(self, values: Any, mask: Mask = None, accumulating: bool = False) -> None:
        """Store the values of the last instruction, cast to the tile's dtype, under ``mask``.

        Raises:
            NkiError: the view leaves its tensor, or the write is a race between ``affine_range`` iterations.
        """
        machine, storage = current(), self.storage
        self.check_bounds(mask)
        assert storage.data is not None
        selected = None if mask is None else np.broadcast_to(mask, self.shape)
        if machine.loops:
            races.note_write(self, selected, accumulating)
        with np.errstate(invalid="ignore", over="ignore"):
            cast = stored(np.broadcast_to(np.asarray(values), self.shape), storage.dtype)
        self.scatter(storage.data, cast if selected is None else cast[selected], selected)

    # --- infix operators: one instruction each ----------------------------------------------------------------------

    def __add__(self, other: Any) -> Tile:
        return OPS["add"](self, other)

    def __sub__(self, other: Any) -> Tile:
        return OPS["subtract"](self, other)

    def __mul__(self, other: Any) -> Tile:
        return OPS["multiply"](self, other)

    def __truediv__(self, other: Any) -> Tile:
        return OPS["divide"](self, other)

    def __radd__(self, other: Any) -> Tile:
        return OPS["add"](other, self)

    def __rsub__(self, other: Any) -> Tile:
        return OPS["subtract"](other, self)

    def __rmul__(self, other: Any) -> Tile:
        return OPS["multiply"](other, self)

    def __rtruediv__(self, other: Any) -> Tile:
        return OPS["divide"](other, self)

    def __iadd__(self, other: Any) -> Tile:
        results.accumulate(self, other)
        return self

    def __repr__(self) -> str:
        return f"Tile({self.shape}, {self.dtype.name}, {self.space.value})"


def declare(shape: Any, dtype: np.dtype = FLOAT32, space: Space = Space.SBUF, name: str = "") -> Tile:
    """Allocate a tile or tensor of ``shape``.

    On chip the axis marked ``par_dim`` is the partition axis, axis 0 without a mark. HBM has no partitions: a tensor
    there is row-major and the mark has no effect.
    """
    dims = tuple(shape) if not isinstance(shape, int) else (shape,)
    axis = 0 if space is Space.HBM else next((i for i, n in enumerate(dims) if isinstance(n, ParDim)), 0)
    storage = current().allocate(tuple(int(n) for n in dims), axis, dtype, space, name)
    return Tile.of(storage, axis)


# At the end because of a cycle: the operators of a tile run instructions, and instructions take tiles.
from neuronmm.emulator.nki import races, results  # noqa: E402
from neuronmm.emulator.nki.ops import OPS  # noqa: E402
