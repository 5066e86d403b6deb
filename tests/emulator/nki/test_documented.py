"""Semantics of the first dialect as AWS documents them (SDK 2.26.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from neuronmm.emulator.nki import NkiError, TensorSpec, nki_modules, run
from neuronmm.emulator.nki.dtypes import NAMES, promoted
from neuronmm.emulator.nki.trace import Engine

with nki_modules():
    import neuronxcc.nki as xnki
    import neuronxcc.nki.isa as xisa
    import neuronxcc.nki.language as xl
    import neuronxcc.nki.typing as xt
    import nki.isa as nisa
    import nki.language as nl

F32, BF16 = np.float32, ml_dtypes.bfloat16
rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(F32)


def output_like(x: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Any:
    return xl.ndarray(shape or x.shape, dtype=dtype or x.dtype, buffer=xl.shared_hbm)


@pytest.mark.parametrize("buffer", ["shared_hbm", "private_hbm", "hbm"])
def test_a_tensor_in_hbm_is_row_major_wherever_par_dim_is(buffer: str) -> None:
    def kernel(x: Any) -> Any:
        blocks, p, f = x.shape
        out = xl.ndarray((blocks, xl.par_dim(p), f), dtype=x.dtype, buffer=getattr(xl, buffer))
        for b in xl.affine_range(blocks):
            xl.store(out[b], value=xl.load(x[b]))
        return out

    x = normal(3, 8, 4)
    np.testing.assert_array_equal(run(kernel, x).outputs[0], x)


@pytest.mark.parametrize(
    ("a", "b", "result"),
    [
        ("int32", "float16", "float16"),
        ("float32", "bfloat16", "float32"),
        ("float16", "bfloat16", "float32"),
        ("float8_e4m3", "float16", "float16"),
        ("float8_e4m3", "bfloat16", "bfloat16"),
        ("float8_e4m3", "float8_e5m2", "bfloat16"),
        ("int16", "int32", "int32"),
        ("uint8", "uint16", "uint16"),
        ("uint16", "int32", "int32"),
        ("int8", "uint8", "int16"),
        ("int8", "uint16", "int32"),
        ("int32", "uint32", "float32"),
        ("int8", 2, "int32"),
        ("float16", 1.2, "float32"),
        ("float16", np.float16(2), "float16"),
        ("bfloat16", 2, "bfloat16"),
        ("bfloat16", 1.5, "float32"),
    ],
)
def test_the_documented_promotions(a: str, b: Any, result: str) -> None:
    other = NAMES[b] if isinstance(b, str) else b
    assert promoted(NAMES[a], other) == promoted(other, NAMES[a]) == NAMES[result]


def test_arithmetic_on_mixed_dtypes_has_the_precision_of_the_wider() -> None:
    def kernel(half: Any, single: Any) -> Any:
        h, s = xl.load(half), xl.load(single)
        ones = xl.ones(h.shape, dtype=xl.bfloat16)
        results = [
            xl.add(h, s), h + s, h * 1.5, 1.5 - h, xisa.tensor_tensor(h, s, op=xl.add),
            xisa.tensor_tensor_scan(ones, s, initial=0, op0=np.multiply, op1=np.add), xl.add(h, s, dtype=xl.bfloat16),
        ]  # fmt: skip
        outs = [output_like(half, dtype=r.dtype) for r in results]
        for out, r in zip(outs, results, strict=True):
            xl.store(out, r)
        return tuple(outs)

    half, single = normal(4, 8).astype(BF16), normal(4, 8)
    wide, outputs = half.astype(F32), run(kernel, half, single).outputs
    expected = [
        wide + single, wide + single, wide * F32(1.5), F32(1.5) - wide, wide + single, np.cumsum(single, 1),
        (wide + single).astype(BF16),
    ]  # fmt: skip
    for output, value in zip(outputs, expected, strict=True):
        assert output.dtype == value.dtype
        np.testing.assert_allclose(output.astype(F32), value.astype(F32), rtol=1e-6)


def test_comparisons_are_boolean() -> None:
    def kernel(x: Any) -> Any:
        result = xl.less(xl.load(x), 0)
        out = output_like(x, dtype=result.dtype)
        xl.store(out, result)
        return out

    x = normal(4, 8)
    (actual,) = run(kernel, x).outputs
    assert actual.dtype == np.bool_
    np.testing.assert_array_equal(actual, x < 0)


@pytest.mark.parametrize("dialect", ["neuronxcc", "nki"])
@pytest.mark.parametrize(("reverse0", "reverse1"), [(False, False), (True, False), (False, True)])
def test_scan_takes_data0_on_the_left(dialect: str, reverse0: bool, reverse1: bool) -> None:
    def kernel(a: Any, b: Any) -> Any:
        out = output_like(a)
        x, y = xl.load(a), xl.load(b)
        flags = {"reverse0": reverse0, "reverse1": reverse1}
        if dialect == "nki":
            result = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
            nisa.tensor_tensor_scan(result, x, y, 0.5, op0=nl.subtract, op1=nl.subtract, **flags)
        else:
            result = xisa.tensor_tensor_scan(x, y, 0.5, op0=np.subtract, op1=np.subtract, **flags)
        xl.store(out, result)
        return out

    a, b = normal(3, 5), normal(3, 5)
    state, expected = np.full(3, F32(0.5)), np.empty_like(a)
    for t in range(5):
        inner = state - a[:, t] if reverse0 else a[:, t] - state
        state = b[:, t] - inner if reverse1 else inner - b[:, t]
        expected[:, t] = state
    np.testing.assert_allclose(run(kernel, a, b).outputs[0], expected, rtol=1e-5, atol=1e-6)


def test_a_copy_of_integers_keeps_every_bit() -> None:
    def kernel(x: Any) -> Any:
        out = output_like(x)
        xl.store(out, xisa.tensor_copy(xl.load(x)))
        return out

    x = np.array([[2**24 + 1, 2**31 - 1, -(2**30) - 1]], np.int32)
    np.testing.assert_array_equal(run(kernel, x).outputs[0], x)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_transpose_may_be_assigned_to_sbuf(dtype: Any) -> None:
    def kernel(x: Any) -> Any:
        out = output_like(x, (x.shape[1], x.shape[0]))
        transposed = xl.ndarray((xl.par_dim(x.shape[1]), 2, x.shape[0]), dtype=x.dtype)
        transposed[:, 1, :] = xisa.nc_transpose(xl.load(x))
        xl.store(out, transposed[:, 1, :])
        return out

    x = normal(16, 8).astype(dtype)
    result = run(kernel, x)
    np.testing.assert_array_equal(result.outputs[0], x.T)
    assert [i.engine for i in result.trace.instructions] == [Engine.DMA, Engine.TENSOR, Engine.VECTOR, Engine.DMA]


def test_bfloat16_may_be_transposed_into_float32() -> None:
    def kernel(x: Any) -> Any:
        out = output_like(x, (x.shape[1], x.shape[0]), F32)
        wide = xl.ndarray((xl.par_dim(x.shape[1]), 2 * x.shape[0]), dtype=xl.float32, buffer=xl.psum)
        wide[:, xl.ds(x.shape[0], x.shape[0])] = xisa.nc_transpose(xl.load(x))
        xl.store(out, xl.copy(wide[:, x.shape[0] : 2 * x.shape[0]]))
        return out

    x = normal(16, 8).astype(BF16)
    np.testing.assert_array_equal(run(kernel, x).outputs[0], x.T.astype(F32))


def test_an_integer_index_keeps_two_axes() -> None:
    def kernel(x: Any) -> Any:
        out = output_like(x, (x.shape[0], 1))
        tile = xl.load(x)
        assert tile[:, 0].shape == tile[:, 3].shape == (x.shape[0], 1)
        sums = xl.ndarray((x.shape[0], 4), dtype=x.dtype)
        for i in xl.affine_range(4):
            sums[:, i] = xisa.tensor_reduce(np.add, tile[:, i : i + 2], axis=1)
        xl.store(out, value=xisa.tensor_tensor(sums[:, 1], sums[:, 2], op=np.subtract))
        return out

    x = normal(8, 6)
    np.testing.assert_allclose(run(kernel, x).outputs[0], x[:, 1:2] - x[:, 3:4], rtol=1e-4, atol=1e-6)


def test_transposing_loads() -> None:
    def kernel(x: Any, cube: Any) -> Any:
        outs = output_like(x, x.shape[::-1]), output_like(x, x.shape[::-1]), output_like(cube, cube.shape[::-1])
        xl.store(outs[0], xl.load_transpose2d(x))
        xl.store(outs[1], xisa.dma_transpose(xl.load(x)))
        xl.store(outs[2], xisa.dma_transpose(cube))
        return outs

    x, cube = normal(40, 12), normal(5, 6, 7)
    first, second, third = run(kernel, x, cube).outputs
    np.testing.assert_array_equal(first, x.T)
    np.testing.assert_array_equal(second, x.T)
    np.testing.assert_array_equal(third, cube.transpose(2, 1, 0))
    with pytest.raises(NkiError, match="partitions"):
        run(lambda x: xl.load_transpose2d(x), TensorSpec((8, 129)))


def test_nki_typing_annotations_match_tiles() -> None:
    def kernel(x: Any) -> None:
        assert isinstance(x, (xnki.tensor, xt.mutable_tensor, xt.tensor, xt.tensor[4, 8]))

    run(kernel, TensorSpec((4, 8)))


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
@pytest.mark.parametrize("isa", [False, True])
def test_a_mask_of_a_reduction_has_the_axes_of_its_input(reduction: str, isa: bool) -> None:
    ops = {"sum": np.add, "max": np.max, "min": np.min}

    def kernel(x: Any) -> Any:
        out = output_like(x, (x.shape[0], x.shape[2]))
        p, i, j = xl.mgrid[0:8, 0:3, 0:4]
        tile = xl.load(x)
        mask = (p < 6) & (2 * i + j < 4)
        result = xl.full((8, 3), -1.0, dtype=x.dtype)
        if isa:
            result[...] = xisa.tensor_reduce(ops[reduction], tile[p, i, j], axis=[2], mask=mask)
        else:
            result[...] = getattr(xl, reduction)(tile[p, i, j], axis=[2], mask=mask)
        xl.store(out[0:8, 0:3], result)
        return out

    x = normal(8, 3, 4)
    (actual,) = run(kernel, x).outputs
    expected = np.full((8, 3), F32(-1))
    for i, count in enumerate((4, 2)):
        expected[:6, i] = getattr(x[:6, i, :count], reduction)(axis=1)
    np.testing.assert_allclose(actual[:, :3], expected, rtol=1e-6)  # the mask excludes every element of row 2


def test_a_mean_takes_no_mask_along_its_axis() -> None:
    def kernel(columns: int) -> Callable[[Any], Any]:
        def body(x: Any) -> Any:
            out = output_like(x, (x.shape[0], 1))
            p, f = xl.mgrid[0:8, 0:4]
            result = xl.full((8, 1), -1.0, dtype=x.dtype)
            result[...] = xl.mean(xl.load(x), axis=[1], mask=(p < 5) & (f < columns))
            xl.store(out, result)
            return out

        return body

    x = normal(8, 4)
    (actual,) = run(kernel(4), x).outputs
    np.testing.assert_allclose(actual[:5, 0], x[:5].mean(axis=1), rtol=1e-5)
    with pytest.raises(NkiError, match="mean"):
        run(kernel(3), x)


def test_a_store_under_a_mask_may_reach_past_the_row() -> None:
    def kernel(x: Any) -> Any:
        out = output_like(x, (6, 10))
        p, f = xl.mgrid[0:8, 0:16]
        tile = xl.load(x[p, f])
        xl.store(out[p, f], value=tile, mask=(p < 6) & (f < 10))
        return out

    x = normal(8, 16)
    np.testing.assert_array_equal(run(kernel, x).outputs[0], x[:6, :10])

    def twice(x: Any) -> Any:
        out = output_like(x, (8, 10))
        p, f = xl.mgrid[0:8, 0:16]
        xl.store(out[p, f - f], value=xl.load(x[p, f]), mask=f < 2)
        return out

    with pytest.raises(NkiError, match="twice"):
        run(twice, x)


def test_a_store_of_psum_copies_to_sbuf_first() -> None:
    def kernel(a: Any, b: Any) -> Any:
        out = output_like(a, (a.shape[1], b.shape[1]))
        xl.store(out, xisa.nc_matmul(xl.load(a), xl.load(b)))
        return out

    a, b = normal(16, 8), normal(16, 4)
    result = run(kernel, a, b)
    np.testing.assert_allclose(result.outputs[0], a.T @ b, rtol=1e-5, atol=1e-5)
    assert [i.op for i in result.trace.instructions[-2:]] == ["copy", "dma"]


def test_a_matmul_accepts_a_transpose_in_psum() -> None:
    def kernel(x: Any, y: Any) -> Any:
        out = output_like(x, (x.shape[0], y.shape[0]))
        xl.store(out, xl.matmul(xl.load(x), xl.transpose(xl.load(y))))
        return out

    x, y = normal(16, 8), normal(4, 8)
    np.testing.assert_allclose(run(kernel, x, y).outputs[0], x @ y.T, rtol=1e-5, atol=1e-5)


def test_empty_like_zeros_like_constants_and_random_tiles() -> None:
    table = np.arange(24).reshape(4, 6)

    def kernel(x: Any) -> Any:
        tile = xl.load(x)
        copied = xl.empty_like(tile, dtype=xl.float32)
        copied[...] = xl.copy(tile)
        total = xl.zeros_like(copied) + copied + xl.load(xl.shared_constant(table, dtype=xl.float32))
        outs = output_like(x, dtype=xl.float32), output_like(x, (2, 12), xl.float32)
        xl.store(outs[0], total)
        xl.store(outs[1].reshape(shape=(4, 6)), xl.rand((4, 6)))
        return outs

    x = xl.static_cast(normal(4, 6), xl.bfloat16)
    total, uniform = run(kernel, x).outputs
    np.testing.assert_array_equal(total, x.astype(F32) + table)
    assert 0 <= uniform.min() < uniform.max() < 1 and np.unique(uniform).size == 24


@pytest.mark.parametrize(
    ("name", "value"),
    [("gelu_apprx_tanh", 0.84119199), ("gelu_apprx_sigmoid", 0.84579577), ("softplus", 1.31326169)],
)
def test_activations_at_one(name: str, value: float) -> None:
    def kernel(x: Any) -> Any:
        out = output_like(x)
        xl.store(out, xisa.activation(op=getattr(xl, name), data=xl.load(x)))
        return out

    (actual,) = run(kernel, np.array([[1, 0, -40]], F32)).outputs
    expected = [value, np.log(2) if name == "softplus" else 0, 0]
    np.testing.assert_allclose(actual[0], expected, rtol=1e-6, atol=1e-9)


def test_one_partition_is_broadcast_over_many() -> None:
    def kernel(x: Any, row: Any) -> Any:
        out = output_like(x)
        xl.store(out, xl.multiply(xl.load(x), xl.load(row)))
        return out

    x, row = normal(16, 8), normal(1, 8)
    np.testing.assert_array_equal(run(kernel, x, row).outputs[0], x * row)


@pytest.mark.parametrize("op", ["add", "maximum"])
def test_a_loop_reduction(op: str) -> None:
    def kernel(x: Any) -> Any:
        out = output_like(x, x.shape[1:])
        total = xl.zeros(x.shape[1:], dtype=x.dtype)
        for i in xl.affine_range(x.shape[0]):
            total[...] = xl.loop_reduce(xl.load(x[i]), op=getattr(np, op), loop_indices=[i])
        xl.store(out, total)
        return out

    x = normal(3, 4, 5)
    expected = x.sum(axis=0) if op == "add" else np.maximum(x.max(axis=0), 0)
    np.testing.assert_allclose(run(kernel, x, shuffle=1).outputs[0], expected, rtol=1e-5, atol=1e-6)


def test_an_activation_reduces_with_a_sum_only() -> None:
    def kernel(op: Any, **options: Any) -> Callable[[Any], Any]:
        def body(x: Any) -> Any:
            outs = output_like(x), output_like(x, (x.shape[0], 1), F32)
            sums = xl.ndarray((x.shape[0], 1), dtype=xl.float32)
            wide = xl.ndarray((x.shape[0], 2 * x.shape[1]), dtype=xl.bfloat16)
            wide[:, 0 : x.shape[1]] = xisa.activation(
                op=np.exp, data=xl.load(x), reduce_op=op, reduce_res=sums[:, 0], dtype=xl.bfloat16, **options
            )
            xl.store(outs[0], wide[:, 0 : x.shape[1]])
            xl.store(outs[1], sums)
            return outs

        return body

    x = normal(8, 16)
    result = run(kernel(np.add, reduce_cmd=xisa.reduce_cmd.reset_reduce), x)
    np.testing.assert_allclose(result.outputs[1][:, 0], np.exp(x).sum(axis=1), rtol=1e-6)  # unrounded elements
    assert [i.op for i in result.trace.instructions] == ["dma", "accumulate_add", "exp", "dma", "dma"]  # no copy
    with pytest.raises(NkiError, match="sum only"):
        run(kernel(np.max, reduce_cmd=xisa.reduce_cmd.reset_reduce), x)
    for options in ({}, {"reduce_cmd": xisa.reduce_cmd.idle}, {"reduce_cmd": xisa.reduce_cmd.reduce}):
        with pytest.raises(NkiError, match="accumulators"):
            run(kernel(np.add, **options), x)


def test_direct_allocation_and_device_timing_refuse_on_use() -> None:
    with nki_modules():
        import neuronxcc.nki.compiler as ncc

    @ncc.skip_middle_end_transformations
    @xnki.jit
    def direct(x: Any) -> None:
        xl.ndarray((128, 4), dtype=x.dtype, buffer=ncc.sbuf.mod_alloc(base_addr=0))

    with pytest.raises(NkiError, match="direct allocation"):
        run(direct, TensorSpec((4, 4)))
    with pytest.raises(NkiError, match="device"):
        xnki.benchmark(warmup=1)(direct)(normal(4, 4))
