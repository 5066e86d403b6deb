"""Tile indices: integers and slices, affine index grids (``nl.arange``, ``nl.mgrid``), masks, ``nl.ds``.

An index grid is an offset and one step per axis, never an array: indexing a tensor with grids gives a strided view,
and costs nothing in a shape-only run.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple

import numpy as np

from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.symbol import Predicate, number, predicate


@dataclass(frozen=True, eq=False)
class Affine:
    """The integers ``offset + sum(step[d] * i[d])`` for ``0 <= i[d] < shape[d]``; a comparison makes a mask of them."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    offset: int = 0

    def __getitem__(self, key: Any) -> Affine:
        """Insert axes: each entry of ``key`` is None (a new axis) or ``:``."""
        keys = key if isinstance(key, tuple) else (key,)
        shape, steps, axis = [], [], 0
        for k in keys:
            if k is None:
                shape.append(1)
                steps.append(0)
            elif isinstance(k, slice) and k == slice(None):
                shape.append(self.shape[axis])
                steps.append(self.steps[axis])
                axis += 1
            else:
                raise TypeError("index a grid (nl.arange, nl.mgrid) only with None and ':'")
        return Affine(tuple(shape) + self.shape[axis:], tuple(steps) + self.steps[axis:], self.offset)

    def _aligned(self, axes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        pad = axes - len(self.shape)
        return (1,) * pad + self.shape, (0,) * pad + self.steps

    def __add__(self, other: Any) -> Affine:
        if not isinstance(other, Affine):
            return Affine(self.shape, self.steps, self.offset + number(other))
        axes = max(len(self.shape), len(other.shape))
        (a, p), (b, q) = self._aligned(axes), other._aligned(axes)
        steps = tuple((s if m > 1 else 0) + (t if n > 1 else 0) for m, s, n, t in zip(a, p, b, q, strict=True))
        return Affine(np.broadcast_shapes(a, b), steps, self.offset + other.offset)

    __radd__ = __add__

    def __mul__(self, factor: int) -> Affine:
        return Affine(self.shape, tuple(s * factor for s in self.steps), self.offset * factor)

    __rmul__ = __mul__

    def __neg__(self) -> Affine:
        return self * -1

    def __sub__(self, other: Any) -> Affine:
        return self + (-other)

    def __rsub__(self, other: int) -> Affine:
        return -self + other

    def values(self, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Return the integers as an array, broadcast to ``shape``."""
        result = np.array(self.offset)
        for axis, (n, step) in enumerate(zip(self.shape, self.steps, strict=True)):
            result = result + (np.arange(n) * step).reshape((n,) + (1,) * (len(self.shape) - axis - 1))
        return np.broadcast_to(result, self.shape if shape is None else shape)

    def bounds(self) -> tuple[int, int]:
        """Return the smallest and the largest integer."""
        spans = [step * (n - 1) for n, step in zip(self.shape, self.steps, strict=True)]
        return self.offset + sum(s for s in spans if s < 0), self.offset + sum(s for s in spans if s > 0)

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: Any) -> Predicate:  # type: ignore[override]
        return predicate(self.values() == _values(other))

    def __ne__(self, other: Any) -> Predicate:  # type: ignore[override]
        return predicate(self.values() != _values(other))

    def __lt__(self, bound: Any) -> Predicate:
        return predicate(self.values() < _values(bound))

    def __le__(self, bound: Any) -> Predicate:
        return predicate(self.values() <= _values(bound))

    def __gt__(self, bound: Any) -> Predicate:
        return predicate(self.values() > _values(bound))

    def __ge__(self, bound: Any) -> Predicate:
        return predicate(self.values() >= _values(bound))


def _values(value: Any) -> Any:
    return value.values() if isinstance(value, Affine) else number(value)


def arange(start: int, stop: int | None = None) -> Affine:
    """``nl.arange``: return an index grid of one axis."""
    first, last = (0, index(start)) if stop is None else (index(start), index(stop))
    return Affine((last - first,), (1,), first)


class _Grid(tuple):
    """The value of ``nl.mgrid[...]``: one index grid per axis, also named ``.p``, ``.x``, ``.y``, ``.z``."""

    p = property(lambda self: self[0])
    x = property(lambda self: self[1])
    y = property(lambda self: self[2])
    z = property(lambda self: self[3])


class MGrid:
    """``nl.mgrid[0:128, 0:512]``: one index grid per axis; the grids broadcast against each other."""

    def __getitem__(self, key: Any) -> _Grid:
        slices = key if isinstance(key, tuple) else (key,)
        axes, shape = len(slices), tuple(s.stop - (s.start or 0) for s in slices)
        return _Grid(
            Affine(
                tuple(shape[d] if d == axis else 1 for d in range(axes)),
                tuple(int(d == axis) for d in range(axes)),
                s.start or 0,
            )
            for axis, s in enumerate(slices)
        )


def ds(start: int, size: int) -> slice:
    """``nl.ds``: return the slice of ``size`` elements from ``start``."""
    return slice(start, start + size)


class ParDim(int):
    """``nl.par_dim(n)``: marks the partition dimension in the shape of a tile."""


class View(NamedTuple):
    """The geometry of a tile in its allocation, in elements; ``partition`` is the axis that runs over partitions."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    partition: int


def index_view(view: View, keys: tuple, on_chip: bool) -> View:
    """Return what the integers, slices, Nones and at most one ellipsis of ``keys`` select of ``view``.

    On chip an integer keeps the partition axis, with size 1, and the result has at least two axes.

    Raises:
        NkiError: too many indices, or an index leaves the view.
    """
    if any(k is Ellipsis for k in keys):
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        fill = len(view.shape) - sum(k is not None and k is not Ellipsis for k in keys)
        keys = keys[:at] + (slice(None),) * fill + keys[at + 1 :]
    shape: list[int] = []
    strides: list[int] = []
    offset, axis, partition = view.offset, 0, view.partition
    overrun = None
    for k in keys:
        if k is None:
            shape.append(1)
            strides.append(0)
            continue
        if axis >= len(view.shape):
            current().fail("rank", f"too many indices for a tile of shape {view.shape}", len(view.shape), len(keys))
        n, stride = view.shape[axis], view.strides[axis]
        if isinstance(k, slice):
            start = 0 if k.start is None else number(k.start)
            stop = n if k.stop is None else number(k.stop)
            step = 1 if k.step is None else int(k.step)
            count = -(-(stop - start) // step)
            end = start + (count - 1) * step
            if count <= 0 or min(start, end) < 0 or max(start, end) >= n:
                overrun = (axis, stop - 1 if count > 0 else start, n)
        else:
            start, step, count = number(k), 1, 1
            if start < 0 or start >= n:
                overrun = (axis, start, n)
        offset += start * stride
        if axis == view.partition:
            partition = len(shape)
        if isinstance(k, slice) or (axis == view.partition and on_chip):
            shape.append(count)
            strides.append(stride * step)
        axis += 1
    shape += view.shape[axis:]
    strides += view.strides[axis:]
    if axis <= view.partition:
        partition = len(shape) - (len(view.shape) - view.partition)
    if len(shape) == 1 and on_chip:
        shape.append(1)
        strides.append(0)
    if overrun:
        message = f"index of axis {overrun[0]} leaves a tile of shape {view.shape}"
        current().fail("out of bounds", message, overrun[2] - 1, overrun[1])
    return View(tuple(shape), tuple(strides), offset, partition)
