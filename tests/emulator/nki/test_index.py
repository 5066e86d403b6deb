"""Indexing a tile selects the same elements as indexing a NumPy array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import examples
from neuronmm.emulator.nki import NkiError, TensorSpec, nki_modules, run
from neuronmm.emulator.nki.index import Affine, MGrid, arange, ds

with nki_modules():
    import neuronxcc.nki.language as xl
    import nki.isa as nisa
    import nki.language as nl

SHAPE = (6, 5, 8)
QUICK = examples(40)


def values() -> np.ndarray:
    return np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)


def read(key: Any) -> np.ndarray:
    """``x[key]`` of an HBM tensor, moved through SBUF."""

    def kernel(x: Any) -> Any:
        view = x[key]
        out = nl.ndarray(view.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=view)
        return out

    return run(kernel, values()).outputs[0]


@st.composite
def keys(draw: st.DrawFn) -> tuple:
    """Basic indices within bounds: integers, slices with and without ends and steps, ``nl.ds``."""
    result: list[Any] = []
    for n in SHAPE[: draw(st.integers(1, 3))]:
        start = draw(st.integers(0, n - 1))
        stop = draw(st.integers(start + 1, n))
        kinds = [
            start,
            slice(start, stop),
            slice(start, stop, draw(st.integers(1, 3))),
            slice(None),
            ds(start, stop - start),
        ]
        result.append(draw(st.sampled_from(kinds)))
    if all(isinstance(k, int) for k in result) and len(result) == 3:
        result[-1] = slice(None)
    return tuple(result)


@QUICK
@given(key=keys())
def test_integers_and_slices(key: tuple) -> None:
    np.testing.assert_array_equal(read(key), values()[key])


@pytest.mark.parametrize("key", [..., (..., 3), (2, ...), (slice(1, 3), ..., slice(0, 4)), (slice(None), None, 2)])
def test_ellipsis_and_new_axes(key: Any) -> None:
    np.testing.assert_array_equal(read(key), values()[key])


@QUICK
@given(a=st.integers(1, 3), b=st.integers(0, 1), c=st.integers(1, 2), start=st.integers(0, 2))
def test_index_grids(a: int, b: int, c: int, start: int) -> None:
    p, f, g = MGrid()[0:3, 0:2, 0:3]
    key = p + start, b + f * a, c * g + start
    array = tuple(k.values() for k in key)
    np.testing.assert_array_equal(read(key), values()[array])
    np.testing.assert_array_equal(read((key[0], 2, key[2])), values()[array[0], 2, array[2]])
    i, j = MGrid()[0:3, 0:2]
    np.testing.assert_array_equal(read((i + start, j)), values()[i.values() + start, j.values()])


def test_grid_arithmetic_equals_array_arithmetic() -> None:
    i, j = arange(5)[:, None], arange(2, 6)[None, :]
    x, y = np.arange(5)[:, None], np.arange(2, 6)[None, :]
    for grid, array in ((3 * i + j - 1, 3 * x + y - 1), (7 - i, 7 - x), (i - j, x - y), (-j + i * 2, -y + x * 2)):
        assert isinstance(grid, Affine)
        np.testing.assert_array_equal(grid.values(), np.broadcast_to(array, grid.shape))
        assert grid.bounds() == (array.min(), array.max())
    np.testing.assert_array_equal(np.asarray(i + j < 5), x + y < 5)
    np.testing.assert_array_equal(np.asarray(i >= j), x >= y)
    np.testing.assert_array_equal(np.asarray(i == j), x == y)
    np.testing.assert_array_equal(np.asarray(i != j), x != y)
    np.testing.assert_array_equal(np.asarray(i + j == 5), x + y == 5)
    np.testing.assert_array_equal(np.asarray(i != 4), x != 4)


@given(inside=st.integers(1, 6))
@examples(10)
def test_masks_bound_loads_and_stores(inside: int) -> None:
    def kernel(x: Any, out: Any) -> None:
        p, f = xl.arange(16)[:, None], xl.arange(8)[None, :]
        tile = xl.load(x[p, 2, f], mask=p < inside)
        xl.store(out[p, f], tile, mask=(p < inside) & (f < 7))

    out = run(kernel, values(), outputs=[TensorSpec((6, 8))]).outputs[0]
    np.testing.assert_array_equal(out[:inside, :7], values()[:inside, 2, :7])
    assert np.isnan(out[inside:]).all() and np.isnan(out[:, 7]).all()


def test_a_mask_that_selects_elements_out_of_bounds() -> None:
    def kernel(x: Any) -> None:
        p, f = xl.arange(16)[:, None], xl.arange(8)[None, :]
        xl.load(x[p, 2, f], mask=p < 7)

    with pytest.raises(NkiError, match="out of bounds") as caught:
        run(kernel, values())
    assert (caught.value.limit, caught.value.actual) == (5, 6)


@QUICK
@given(count=st.integers(1, 4), step=st.integers(1, 20), offset=st.integers(0, 60), inner=st.integers(1, 8))
def test_access_patterns(count: int, step: int, offset: int, inner: int) -> None:
    def kernel(x: Any) -> Any:
        view = x.ap([[step, count], [1, inner]], offset=offset)
        out = nl.ndarray(view.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=view)
        return out

    expected = values().reshape(-1)[offset + step * np.arange(count)[:, None] + np.arange(inner)]
    np.testing.assert_array_equal(run(kernel, values()).outputs[0], expected)


@pytest.mark.parametrize("data", [True, False], ids=["data", "shapes"])
def test_the_lower_end_of_a_negative_step_is_checked(data: bool) -> None:
    """NumPy would read the row above, or the end of the tensor."""

    def pattern(x: Any) -> None:
        nisa.dma_copy(dst=nl.ndarray((2, 8), dtype=x.dtype, buffer=nl.sbuf), src=x.ap([[8, 2], [-1, 8]], offset=3))

    def rows(x: Any) -> None:
        nisa.dma_copy(dst=nl.ndarray((2, 5), dtype=x.dtype, buffer=nl.sbuf), src=x[1:3, 0, 1:-4:-1])

    for kernel, limits in ((pattern, (239, -4)), (rows, None)):
        with pytest.raises(NkiError, match="out of bounds") as caught:
            run(kernel, values() if data else TensorSpec(SHAPE))
        assert limits in (None, (caught.value.limit, caught.value.actual))


def test_reshape_and_broadcast() -> None:
    def kernel(x: Any, out: Any) -> None:
        row = xl.load(x.reshape((6, 40))[0:1, 0:40])
        xl.store(out, xl.copy(row.broadcast_to((4, 40))))

    out = run(kernel, values(), outputs=[TensorSpec((4, 40))]).outputs[0]
    np.testing.assert_array_equal(out, np.broadcast_to(values().reshape(6, 40)[:1], (4, 40)))
