"""Kernels in the style of the public tutorials, in both dialects, against NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from neuronmm.emulator.nki import TensorSpec, nki_modules, run

with nki_modules():
    import neuronxcc.nki as xnki
    import neuronxcc.nki.isa as xisa
    import neuronxcc.nki.language as xl
    import neuronxcc.nki.typing as xt
    import nki
    import nki.isa as nisa
    import nki.language as nl

F32 = np.float32


@xnki.jit
def softmax(x):  # type: ignore[no-untyped-def]
    out = xl.ndarray(x.shape, dtype=x.dtype, buffer=xl.shared_hbm)
    p, f = xl.arange(128)[:, None], xl.arange(x.shape[1])[None, :]
    for i in xl.affine_range(math.ceil(x.shape[0] / 128)):
        inside = i * 128 + p < x.shape[0]
        tile = xl.load(x[i * 128 + p, f], mask=inside)
        shifted = xl.subtract(tile, xl.max(tile, axis=[1], keepdims=True, mask=inside), mask=inside)
        numerator = xl.exp(shifted)
        xl.store(out[i * 128 + p, f], value=numerator / xl.sum(numerator, axis=[1]), mask=inside)
    return out


@xnki.jit
def add_on_a_launch_grid(a, b):  # type: ignore[no-untyped-def]
    out = xl.ndarray(a.shape, dtype=a.dtype, buffer=xl.shared_hbm)
    i = xl.program_id(0) * 64 + xl.arange(64)[:, None]
    j = xl.program_id(1) * 32 + xl.arange(32)[None, :]
    xl.store(out[i, j], value=xl.load(a[i, j]) + xl.load(b[i, j]))
    return out


@xnki.jit
def transpose_rows(x, rows, columns):  # type: ignore[no-untyped-def]
    out = xl.ndarray(x.shape, dtype=x.dtype, buffer=xl.shared_hbm)
    tile = xl.load(x)
    transposed = xl.ndarray(x.shape, dtype=x.dtype)
    p, i, j = xl.mgrid[0 : x.shape[0], 0:rows, 0:columns]
    transposed[p, j * rows + i] = xl.copy(tile[p, i * columns + j])
    xl.store(out, value=transposed)
    return out


@xnki.jit
def scan(a, b):  # type: ignore[no-untyped-def]
    out = xl.ndarray(a.shape, dtype=a.dtype, buffer=xl.shared_hbm)
    result: xt.tensor[a.shape] = xisa.tensor_tensor_scan(xl.load(a), xl.load(b), initial=0, op0=np.multiply, op1=np.add)
    xl.store(out, result)
    return out


@xnki.jit
def average_pool(x):  # type: ignore[no-untyped-def]
    c, h, w = x.shape
    out = xl.ndarray((c, h // 2, w // 2), dtype=x.dtype, buffer=xl.shared_hbm)
    tile = xl.load(x)
    p, i, j, k, m = xl.mgrid[0:c, 0 : h // 2, 0:2, 0 : w // 2, 0:2]
    xl.store(out, value=xl.sum(tile[p, 2 * i + j, 2 * k + m], axis=[2, 4]) / 4)
    return out


@xnki.jit
def blocked_matmul(a, b):  # type: ignore[no-untyped-def]
    depth, height = a.shape
    out = xl.ndarray((height, b.shape[1]), dtype=a.dtype, buffer=xl.shared_hbm)
    grid = xl.mgrid[0:128, 0:128]
    for m in xl.affine_range(height // 128):
        left = xl.ndarray((depth // 128, xl.par_dim(128), 128), dtype=a.dtype, buffer=xl.sbuf)
        right = xl.ndarray((depth // 128, xl.par_dim(128), b.shape[1]), dtype=a.dtype, buffer=xl.sbuf)
        for k in xl.affine_range(depth // 128):
            left[k, grid.p, grid.x] = xl.load(a[k * 128 + grid.p, m * 128 + grid.x])
            right[k] = xl.load(b[xl.ds(k * 128, 128), :])
        acc = xl.zeros((128, b.shape[1]), xl.float32, buffer=xl.psum)
        for k in xl.affine_range(depth // 128):
            acc[...] += xl.matmul(left[k, grid.p, grid.x], right[k], transpose_x=True)
        xl.store(
            out[m * 128 + xl.arange(128)[:, None], xl.arange(b.shape[1])[None, :]], value=xl.copy(acc, dtype=a.dtype)
        )
    return out


@nki.jit
def tiled_matmul(a, b):  # type: ignore[no-untyped-def]
    depth, height = a.shape
    out = nl.ndarray((height, b.shape[1]), dtype=a.dtype, buffer=nl.shared_hbm)
    for m in nl.affine_range(height // 128):
        acc = nl.ndarray((128, b.shape[1]), nl.float32, buffer=nl.psum)
        for k in range(depth // 128):
            left = nl.ndarray((128, 128), dtype=a.dtype, buffer=nl.sbuf)
            right = nl.ndarray((128, b.shape[1]), dtype=b.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=left, src=a[k * 128 : (k + 1) * 128, m * 128 : (m + 1) * 128])
            nisa.dma_copy(dst=right, src=b[k * 128 : (k + 1) * 128, :])
            nisa.nc_matmul(dst=acc, stationary=left, moving=right)
        result = nl.ndarray(acc.shape, dtype=a.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=result, src=acc)
        nisa.dma_copy(dst=out[m * 128 : (m + 1) * 128, :], src=result)
    return out


@xnki.jit
def attention_row(q, k, v):  # type: ignore[no-untyped-def]
    out = xl.ndarray((q.shape[1], v.shape[0]), dtype=q.dtype, buffer=xl.shared_hbm)
    scores = xisa.nc_matmul(stationary=xl.load(q), moving=xl.load(k))
    shifted = xisa.tensor_scalar(scores, op0=xl.subtract, operand0=xisa.tensor_reduce(xl.max, scores, axis=1))
    weights = xisa.activation(op=xl.exp, data=shifted)
    norm = xisa.reciprocal(xisa.tensor_reduce(op=xl.add, data=weights, axis=1))
    weights = xisa.tensor_scalar(weights, op0=xl.multiply, operand0=norm)
    transposed = xisa.tensor_copy(xisa.nc_transpose(weights))
    values = xisa.tensor_copy(xisa.nc_transpose(xl.load(v)))
    result = xisa.nc_matmul(transposed, values)
    xl.store(out, value=xl.copy(result))
    return out


def normal_arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape).astype(F32) for shape in shapes]


def assert_close(actual: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


def test_softmax_with_masks() -> None:
    (x,) = normal_arrays((200, 50))
    e = np.exp(x - x.max(1, keepdims=True))
    assert_close(softmax(x), e / e.sum(1, keepdims=True))


def test_launch_grid() -> None:
    a, b = normal_arrays((128, 96), (128, 96))
    np.testing.assert_array_equal(add_on_a_launch_grid[2, 3](a, b), a + b)


def test_free_axis_transposition() -> None:
    (x,) = normal_arrays((5, 12))
    np.testing.assert_array_equal(transpose_rows(x, 3, 4), x.reshape(5, 3, 4).transpose(0, 2, 1).reshape(5, 12))


def test_scan() -> None:
    a, b = normal_arrays((8, 30), (8, 30))
    a /= 2
    state, expected = np.zeros(8), np.zeros_like(b)
    for t in range(30):
        state = state * a[:, t] + b[:, t]
        expected[:, t] = state
    assert_close(scan(a, b), expected)


def test_pooling_over_a_five_axis_view() -> None:
    (x,) = normal_arrays((3, 6, 8))
    assert_close(average_pool(x), x.reshape(3, 3, 2, 4, 2).mean(axis=(2, 4)))


@pytest.mark.parametrize("kernel", [blocked_matmul, tiled_matmul], ids=["neuronxcc", "nki"])
def test_matmuls(kernel: Any) -> None:
    a, b = normal_arrays((256, 256), (256, 200))
    np.testing.assert_allclose(kernel(a, b), a.T @ b, rtol=1e-4, atol=1e-4)
    trace = run(kernel, TensorSpec(a.shape), TensorSpec(b.shape)).trace
    assert trace.multiply_adds() == 256 * 256 * 200


def test_attention() -> None:
    q, k, v = normal_arrays((64, 128), (64, 128), (64, 128))
    scores = q.T @ k
    e = np.exp(scores - scores.max(1, keepdims=True))
    assert_close(attention_row(q, k, v), e / e.sum(1, keepdims=True) @ v.T)


def test_simulate_equals_a_launch() -> None:
    a, b = normal_arrays((128, 128), (128, 64))
    with nki_modules():
        from nki import simulate
    np.testing.assert_array_equal(simulate(tiled_matmul)(a, b), tiled_matmul(a, b))
