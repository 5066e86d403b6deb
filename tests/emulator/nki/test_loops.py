"""Loops of the first dialect: which indices are numbers, and what Python's ``range`` becomes.

"Neuron compiler transforms any usage of Python range() API into nl.sequential_range()" (programming guide of NKI 2.26);
only ``nl.static_range`` is unrolled while the kernel is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from neuronmm.emulator.nki import NkiError, TensorSpec, nki_modules, run

with nki_modules():
    import neuronxcc.nki as xnki
    import neuronxcc.nki.isa as xisa
    import neuronxcc.nki.language as xl
    import nki
    import nki.isa as nisa
    import nki.language as nl

X = np.arange(32, dtype=np.float32).reshape(4, 8)
LOOPS: dict[str, Callable[[int], Any]] = {"affine": xl.affine_range, "sequential": xl.sequential_range}


def python_loop(x: Any, y: Any, use: Callable[[Any, Any], Any]) -> None:
    for i in range(4):
        tile = xl.load(x[:, i : i + 1])
        use(i, tile)
        xl.store(y[:, i : i + 1], value=tile)


def as_list_index(i: Any, tile: Any) -> Any:
    return [tile, tile, tile, tile][i]


def as_condition(i: Any, tile: Any) -> Any:
    return tile if i == 0 else None


def as_argument_of_min(i: Any, tile: Any) -> Any:
    return min(i, 2)


def as_bound_of_a_loop(i: Any, tile: Any) -> Any:
    return [0 for _ in range(i)]


def as_dictionary_key(i: Any, tile: Any) -> Any:
    return {0: tile}.get(i)


def times_itself(i: Any, tile: Any) -> Any:
    return i * i


def plus_a_float(i: Any, tile: Any) -> Any:
    return 0.5 + i


def as_operand(i: Any, tile: Any) -> Any:
    return xl.multiply(tile, i)


@pytest.mark.parametrize(
    "use",
    [
        as_list_index,
        as_condition,
        as_argument_of_min,
        as_bound_of_a_loop,
        as_dictionary_key,
        times_itself,
        plus_a_float,
        as_operand,
    ],
)
def test_an_index_of_pythons_range_is_a_symbol(use: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(NkiError) as caught:
        run(lambda x, y: python_loop(x, y, use), X, outputs=[TensorSpec((4, 4))])
    assert caught.value.rule == ("operand" if use is as_operand else "symbolic index")
    assert caught.value.location.startswith(__file__)


@pytest.mark.parametrize("name", LOOPS)
def test_an_index_of_affine_range_and_sequential_range_is_a_symbol(name: str) -> None:
    def kernel(x: Any, y: Any) -> None:
        tiles = [xl.load(x[:, 0:1]), xl.load(x[:, 1:2])]
        for i in LOOPS[name](2):
            xl.store(y[:, i : i + 1], value=tiles[i])

    with pytest.raises(NkiError, match="static_range"):
        run(kernel, X, outputs=[TensorSpec((4, 2))])


def test_an_index_of_static_range_is_a_number() -> None:
    def kernel(x: Any, y: Any) -> None:
        tiles = [xl.load(x[:, 0:1]), xl.load(x[:, 1:2])]
        for i in xl.static_range(2):
            if i < 2:
                xl.store(y[:, i : i + 1], value=tiles[i])

    assert np.array_equal(run(kernel, X, outputs=[TensorSpec((4, 2))]).outputs[0], X[:, :2])


def copies_with_symbolic_addresses(x: Any) -> Any:
    y = xl.ndarray((4, 16), dtype=x.dtype, buffer=xl.shared_hbm)
    p, f = xl.arange(4)[:, None], xl.arange(3)[None, :]
    for i in range(2):
        for j in range(1, 3):
            tile = xl.load(x[:, xl.ds(2 * i + j - 1, 2)])
            xl.store(y[:, 8 * i + 4 * (j - 1) : 8 * i + 4 * (j - 1) + 2], value=tile)
            wide = xl.load(x[p, f + i * 3], mask=f + i * 3 < 5)
            xl.store(y[:, 8 * i + 4 * j - 2 : 8 * i + 4 * j - 1], value=wide[:, 0:1])
    return y


def expected_copies() -> np.ndarray:
    y = np.full((4, 16), np.nan, np.float32)
    for i in range(2):
        for j in range(1, 3):
            y[:, 8 * i + 4 * (j - 1) : 8 * i + 4 * (j - 1) + 2] = X[:, 2 * i + j - 1 : 2 * i + j + 1]
            y[:, 8 * i + 4 * j - 2] = X[:, i * 3]
    return y


def test_indices_address_tiles_and_make_masks() -> None:
    np.testing.assert_array_equal(xnki.simulate_kernel(xnki.jit(copies_with_symbolic_addresses), X), expected_copies())


def test_a_mask_may_depend_on_an_index_alone() -> None:
    def kernel(x: Any, y: Any) -> None:
        for i in xl.sequential_range(4):
            xl.store(y[:, i : i + 1], value=xl.load(x[:, i : i + 1]), mask=i < 2)

    y = run(kernel, X, outputs=[TensorSpec((4, 4))]).outputs[0]
    assert np.array_equal(y[:, :2], X[:, :2]) and np.isnan(y[:, 2:]).all()


def test_a_branch_on_a_grid_is_refused() -> None:
    def kernel(x: Any, y: Any) -> None:
        if xl.arange(4)[:, None] < 2:
            xl.store(y, value=xl.load(x))

    with pytest.raises(NkiError, match="symbolic index"):
        run(kernel, X, outputs=[TensorSpec((4, 8))])


def test_a_comprehension_has_numbers() -> None:
    def kernel(x: Any, y: Any) -> None:
        columns = [(i + 1) % 4 for i in range(4)]
        for i in xl.static_range(4):
            xl.store(y[:, i : i + 1], value=xl.load(x[:, columns[i] : columns[i] + 1]))

    assert np.array_equal(run(kernel, X, outputs=[TensorSpec((4, 4))]).outputs[0], X[:, [1, 2, 3, 0]])


def test_range_is_restored_after_the_kernel() -> None:
    run(lambda x, y: python_loop(x, y, lambda i, tile: None), X, outputs=[TensorSpec((4, 4))])
    assert "range" not in globals()
    for i in range(1):
        assert [7][i] == 7


@nki.jit
def unrolled_kernel(x):  # type: ignore[no-untyped-def]
    y = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.shared_hbm)
    tiles = [nl.ndarray((4, 1), dtype=x.dtype, buffer=nl.sbuf) for _ in range(4)]
    for i in range(4):
        nisa.dma_copy(dst=tiles[i], src=x[:, i : i + 1])
        if i % 2 == 0:
            nisa.tensor_scalar(tiles[i], tiles[i], nl.multiply, 2.0)
        nisa.dma_copy(dst=y[:, i : i + 1], src=tiles[i])
    return y


def test_the_second_dialect_unrolls_loops() -> None:
    np.testing.assert_array_equal(unrolled_kernel(X), X[:, :4] * [2, 1, 2, 1])


def test_matmuls_accumulate_over_pythons_range() -> None:
    def kernel(x: Any, y: Any) -> None:
        acc = xl.zeros((8, 8), dtype=xl.float32, buffer=xl.psum)
        for i in range(2):
            tile = xl.load(x[xl.ds(i * 2, 2), :])
            acc[...] += xisa.nc_matmul(tile, tile)
        xl.store(y, value=xl.copy(acc))

    np.testing.assert_allclose(run(kernel, X, outputs=[TensorSpec((8, 8))]).outputs[0], X.T @ X)
