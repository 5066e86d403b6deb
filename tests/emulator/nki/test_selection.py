"""Selections, shuffles, top-8 and statistics against NumPy, in both dialects where both have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from neuronmm.emulator.nki import NkiError, TensorSpec, nki_modules, run
from neuronmm.emulator.nki.tensors import target_core
from neuronmm.kernels.hardware import TRN1, TRN2

with nki_modules():
    import neuronxcc.nki.isa as xisa
    import neuronxcc.nki.language as xl
    import nki.isa as nisa
    import nki.language as nl

F32, BF16, U32 = np.float32, ml_dtypes.bfloat16, np.uint32
rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(F32)


def outputs_of(*tiles: Any) -> Any:
    """Store the tiles in outputs and return these."""
    outs = tuple(xl.ndarray(t.shape, dtype=t.dtype, buffer=xl.shared_hbm) for t in tiles)
    for out, tile in zip(outs, tiles, strict=True):
        xl.store(out, tile)
    return outs


def sbuf_tile(*shape: int, dtype: Any = F32) -> Any:
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def test_iota_and_affine_select() -> None:
    def first(x: Any) -> Any:
        p, f = xl.mgrid[0:8, 0:12]
        tile = xl.load(x)
        return outputs_of(
            xisa.iota(3 * p - f + 5, dtype=xl.int32), xisa.affine_select(2 * f <= p, tile[p, f], on_false_value=-7.0)
        )

    def second(x: Any) -> Any:
        numbers, selected = sbuf_tile(8, 3, 4, dtype=np.int32), sbuf_tile(8, 12)
        nisa.iota(numbers, [[-4, 3], [-1, 4]], offset=5, channel_multiplier=3)
        nisa.affine_select(selected, [[-2, 12]], 1, xl.load(x), -7.0, cmp_op=nl.greater_equal)
        return outputs_of(numbers, selected)

    x, (p, f) = normal(8, 12), np.mgrid[0:8, 0:12]
    for kernel in (first, second):
        numbers, selected = run(kernel, x).outputs
        np.testing.assert_array_equal(numbers.reshape(8, 12), 3 * p - f + 5)
        np.testing.assert_array_equal(selected, np.where(2 * f <= p, x, F32(-7)))


def test_affine_select_of_psum_copies_to_sbuf_first() -> None:
    def kernel(a: Any, b: Any) -> Any:
        p, f = xl.mgrid[0:8, 0:12]
        return outputs_of(xisa.affine_select(f <= p, xisa.nc_matmul(xl.load(a), xl.load(b)), on_false_value=-7.0))

    a, b, (p, f) = normal(4, 8), normal(4, 12), np.mgrid[0:8, 0:12]
    result = run(kernel, a, b)
    np.testing.assert_allclose(result.outputs[0], np.where(f <= p, a.T @ b, -7), rtol=1e-5, atol=1e-5)
    assert [i.op for i in result.trace.instructions] == ["dma", "dma", "matmul", "copy", "affine_select", "dma"]


@pytest.mark.parametrize("reverse", [False, True])
def test_predicated_copies_and_selects(reverse: bool) -> None:
    def first(x: Any, y: Any, predicate: Any, column: Any) -> Any:
        a, p, target, dst = xl.load(x), xl.load(predicate), xl.load(y), xl.ndarray(x.shape, dtype=xl.bfloat16)
        largest = xl.ndarray((x.shape[0], 1), dtype=xl.float32)
        xisa.tensor_copy_predicated(src=a, dst=target, predicate=p, reverse_pred=reverse)
        xisa.select_reduce(
            dst=dst, predicate=p, on_true=a, on_false=xl.load(column), reduce_res=largest, reverse_pred=reverse,
            reduce_cmd=xisa.reduce_cmd.reset_reduce, reduce_op=xl.max,
        )  # fmt: skip
        return outputs_of(target, dst, largest)

    def second(x: Any, y: Any, predicate: Any, column: Any) -> Any:
        a, p, target = xl.load(x), xl.load(predicate), xl.load(y)
        dst, largest = sbuf_tile(8, 12, dtype=BF16), sbuf_tile(8, 1)
        nisa.tensor_copy_predicated(target, a, p, reverse_pred=reverse)
        nisa.select_reduce(
            dst, p, a, xl.load(column), largest, nisa.reduce_cmd.reset_reduce, reverse_pred=reverse
        )  # fmt: skip
        return outputs_of(target, dst, largest)

    x, y, column = normal(8, 12), normal(8, 12), normal(8, 1) - 9
    predicate = rng.integers(0, 3, (8, 12)).astype(np.uint8)
    selected = (predicate != 0) != reverse
    for kernel in (first, second):
        target, dst, largest = run(kernel, x, y, predicate, column).outputs
        np.testing.assert_array_equal(target, np.where(selected, x, y))
        np.testing.assert_array_equal(dst, np.where(selected, x, column).astype(BF16))
        np.testing.assert_array_equal(largest, np.where(selected, x, column).max(axis=1, keepdims=True))


def test_where() -> None:
    def kernel(x: Any, y: Any) -> Any:
        a, b = xl.load(x), xl.load(y)
        return outputs_of(xl.where(xl.less(a, b), a, b), xl.where(xl.less(a, b), a, 1.5))

    x, y = normal(8, 12), normal(8, 12)
    smaller, other = run(kernel, x, y).outputs
    np.testing.assert_array_equal(smaller, np.minimum(x, y))
    np.testing.assert_array_equal(other, np.where(x < y, x, F32(1.5)))


def test_range_select_needs_v3() -> None:
    def kernel(x: Any, low: Any, high: Any) -> Any:
        largest = xl.ndarray((x.shape[0], 1), dtype=xl.float32)
        result = xisa.range_select(
            on_true_tile=xl.load(x), comp_op0=np.greater_equal, comp_op1=np.less, bound0=xl.load(low),
            bound1=xl.load(high), range_start=3, on_false_value=xl.fp32.min, reduce_op=np.max, reduce_res=largest,
            reduce_cmd=xisa.reduce_cmd.reset_reduce, dtype=xl.bfloat16,
        )  # fmt: skip
        return outputs_of(result, largest)

    x, low, high = normal(8, 12), np.full((8, 1), F32(5)), np.arange(6, 14, dtype=F32)[:, None]
    position = 3 + np.arange(12)
    expected = np.where((position >= low) & (position < high), x, np.finfo(F32).min)
    result, largest = run(kernel, x, low, high, core=TRN2).outputs
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(result, expected.astype(BF16))  # FP32_MIN is -inf in bfloat16 ...
    np.testing.assert_array_equal(largest, expected.max(axis=1, keepdims=True))  # ... but not in the reduction
    with pytest.raises(NkiError, match="v2"):
        run(kernel, x, low, high)
    with pytest.raises(NkiError, match="the data of range_select must have a floating-point dtype"):
        run(kernel, x.astype(np.int32), low, high, core=TRN2)


@pytest.mark.parametrize("partitions", [32, 128])
@pytest.mark.parametrize("dialect", ["neuronxcc", "nki"])
def test_shuffles_within_quadrants(partitions: int, dialect: str) -> None:
    order = [(i - 1) % 32 if i != 5 else 255 for i in range(32)]

    def kernel(x: Any, y: Any) -> Any:
        source, target, row = xl.load(x), xl.load(y), xl.ndarray((32, 6), dtype=y.dtype)
        if dialect == "neuronxcc":
            xisa.nc_stream_shuffle(src=source, dst=target, shuffle_mask=order)
            xisa.nc_stream_shuffle(src=source[0:1, :], dst=row, shuffle_mask=[0] * 32)
        else:
            nisa.nc_stream_shuffle(target, source, order)
            nisa.nc_stream_shuffle(row, source[0:1, :], [0] * 32)
        xisa.nc_stream_shuffle(src=source, dst=source, shuffle_mask=list(range(31, -1, -1)))
        return outputs_of(target, row, source)

    x = rng.integers(2**24, 2**31, (partitions, 6)).astype(np.int32)
    target, row, inplace = run(kernel, x, -x).outputs
    positions = np.arange(partitions)
    moved = x[positions // 32 * 32 + np.array(order)[positions % 32] % 32]
    np.testing.assert_array_equal(target, np.where((positions % 32 == 5)[:, None], -x, moved))
    np.testing.assert_array_equal(row, np.repeat(x[:1], 32, axis=0))
    np.testing.assert_array_equal(inplace, x.reshape(-1, 32, 6)[:, ::-1].reshape(x.shape))


def shuffled(order: list[int], **shapes: Any) -> Callable[[Any], None]:
    def kernel(x: Any) -> None:
        source = xl.load(x)
        xisa.nc_stream_shuffle(src=source[0:4], dst=xl.ndarray((32, 6), dtype=x.dtype, **shapes), shuffle_mask=order)

    return kernel


@pytest.mark.parametrize("order", [[0] * 31, [32] * 32, [4] * 32])
def test_a_shuffle_stays_within_its_source(order: list[int]) -> None:
    with pytest.raises(NkiError, match="shuffle"):
        run(shuffled(order), TensorSpec((32, 6)))


def test_max8_find_index8_and_match_replace8() -> None:
    def first(x: Any) -> Any:
        data = xl.load(x)
        positions = xl.ndarray((x.shape[0], 8), dtype=xl.uint32)
        top = xisa.max8(src=data)
        remaining = xisa.nc_match_replace8(data=data, vals=top, imm=-9.0, dst_idx=positions)
        return outputs_of(top, xisa.nc_find_index8(data=data, vals=top), positions, remaining)

    def second(x: Any) -> Any:
        data, top, indices = xl.load(x), sbuf_tile(4, 8), sbuf_tile(4, 8, dtype=U32)
        positions, remaining = sbuf_tile(4, 8, dtype=U32), sbuf_tile(4, 3, 5)
        nisa.max8(top, data)
        nisa.nc_find_index8(indices, data, top)
        nisa.nc_match_replace8(remaining, data, top, -9.0, positions)
        return outputs_of(top, indices, positions, remaining)

    x = normal(4, 3, 5)
    x[0, 0, :2] = 7.0  # a tie
    rows = x.reshape(4, 15)
    order = np.argsort(-rows, axis=1, kind="stable")[:, :8]
    expected = np.take_along_axis(rows, order, axis=1)
    remaining = rows.copy()
    np.put_along_axis(remaining, order, F32(-9), axis=1)
    replaced_at = order.copy()
    replaced_at[0, :2] = 1, 0  # of equal values, the replacement begins with the last
    for kernel in (first, second):
        top, indices, positions, replaced = run(kernel, x).outputs
        np.testing.assert_array_equal(top, expected)
        np.testing.assert_array_equal(positions, replaced_at)
        np.testing.assert_array_equal(indices, order)
        np.testing.assert_array_equal(replaced.reshape(4, 15), remaining)
    assert indices.dtype == positions.dtype == U32


@pytest.mark.parametrize("dtype", [U32, np.uint16])
def test_a_missing_value_has_an_index_of_ones_and_cannot_be_replaced(dtype: Any) -> None:
    def find(x: Any, values: Any) -> Any:
        indices = sbuf_tile(4, 8, dtype=dtype)
        nisa.nc_find_index8(indices, xl.load(x), xl.load(values))
        return outputs_of(indices)

    def replace(x: Any, values: Any) -> Any:
        return outputs_of(xisa.nc_match_replace8(data=xl.load(x), vals=xl.load(values), imm=0.0))

    x, values = normal(4, 16), normal(4, 8)
    values[2, 3] = x[2, 5]
    expected = np.full((4, 8), np.iinfo(dtype).max, dtype)
    expected[2, 3] = 5
    np.testing.assert_array_equal(run(find, x, values).outputs[0], expected)
    with pytest.raises(NkiError, match="undefined"):
        run(replace, x, values)


def test_the_top_8_instructions_need_8_elements() -> None:
    with pytest.raises(NkiError, match="top-8"):
        run(lambda x: xisa.max8(src=xl.load(x)), TensorSpec((4, 7)))


@pytest.mark.parametrize("dialect", ["neuronxcc", "nki"])
def test_bn_stats_and_bn_aggr(dialect: str) -> None:
    def kernel(x: Any) -> Any:
        tile, stats, result = xl.load(x), xl.ndarray((8, 12), dtype=xl.float32), sbuf_tile(8, 2)
        for i in range(2):
            part = tile[:, i * 15 : i * 15 + 15 + i * 6]
            if dialect == "nki":
                nisa.bn_stats(stats[:, i * 6 : i * 6 + 6], part)
            else:
                stats[:, i * 6 : i * 6 + 6] = xisa.bn_stats(part)
        if dialect == "nki":
            nisa.bn_aggr(result, stats)
        else:
            result = xisa.bn_aggr(stats)
        return outputs_of(stats, result)

    x = normal(8, 36) + 3
    stats, result = run(kernel, x).outputs
    np.testing.assert_allclose(stats[:, :3], np.stack([np.full(8, 8), *moments(x[:, 0:15:2])], 1), rtol=1e-5)
    np.testing.assert_allclose(stats[:, 9:], np.stack([np.full(8, 10), *moments(x[:, 16:36:2])], 1), rtol=1e-5)
    np.testing.assert_allclose(result, np.stack([x.mean(1), x.var(1)], 1), rtol=1e-5)
    with pytest.raises(NkiError, match="bn_stats"):
        run(lambda x: xisa.bn_stats(xl.load(x)), TensorSpec((4, 513)))


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x.mean(axis=1), x.var(axis=1) * x.shape[1]


def test_reductions_beside_a_result_and_over_partitions() -> None:
    def kernel(x: Any, y: Any) -> Any:
        a, b, largest = xl.load(x), xl.load(y), xl.ndarray((8, 1), dtype=xl.float32)
        doubled = xisa.tensor_scalar_reduce(
            data=a, op0=np.multiply, operand0=2.0, reduce_op=np.max, reduce_res=largest
        )  # fmt: skip
        both = xisa.scalar_tensor_tensor(
            data=a, op0=np.subtract, operand0=0.5, reverse0=True, op1=np.multiply, operand1=b
        )
        second = sbuf_tile(8, 12)
        nisa.scalar_tensor_tensor(second, a, nl.subtract, 0.5, nl.multiply, b, reverse0=True)
        return outputs_of(doubled, largest, both, second, xisa.tensor_partition_reduce(np.add, a))

    x, y = normal(8, 12), normal(8, 12)
    doubled, largest, both, second, total = run(kernel, x, y).outputs
    np.testing.assert_array_equal(doubled, 2 * x)
    np.testing.assert_array_equal(largest, 2 * x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(both, (F32(0.5) - x) * y, rtol=1e-6)
    np.testing.assert_array_equal(both, second)
    np.testing.assert_allclose(total, x.sum(axis=0, keepdims=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("position", "size", "fits"),
    [((64, 0), (64, 64), True), ((64,), (), False), ((16, 0), (64, 64), False), ((96, 0), (64, 64), False),
     ((0, 0), (64, 32), False)],
)  # fmt: skip
def test_a_matmul_on_a_part_of_the_engine(position: tuple[int, ...], size: tuple[int, ...], fits: bool) -> None:
    def kernel(a: Any, b: Any) -> Any:
        return outputs_of(xisa.nc_matmul(xl.load(a), xl.load(b), tile_position=position, tile_size=size))

    a, b = normal(40, 30), normal(40, 9)
    if fits:
        np.testing.assert_allclose(run(kernel, a, b).outputs[0], a.T @ b, rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(NkiError, match="tile"):
            run(kernel, a, b)


def test_a_launch_grid_without_programs_and_indirect_addresses_are_refused() -> None:
    with nki_modules():
        import neuronxcc.nki as xnki

    @xnki.jit
    def kernel(x: Any) -> Any:
        return outputs_of(xl.load(x[xl.load(x), 0:4]))

    @xnki.jit
    def gathered(x: Any) -> Any:
        return outputs_of(xl.load(x[xl.load(x)[xl.arange(4)[:, None], 0], xl.arange(4)[None, :]]))

    with pytest.raises(NkiError, match="programs"):
        kernel[0](normal(4, 4))
    for indirect in (kernel, gathered):
        with pytest.raises(NkiError, match="indirect"):
            indirect(normal(4, 4))


def test_a_traced_kernel_writes_into_the_arrays_it_is_given() -> None:
    """As AWS's tests of ``tensor_partition_reduce`` expect of ``simulate_kernel``."""
    with nki_modules():
        import neuronxcc.nki as xnki

    @xnki.trace
    def kernel(x: Any, y: Any) -> None:
        xl.store(y, xisa.tensor_partition_reduce(np.add, xl.load(x)))

    x = normal(8, 12)
    for names in ((), ("y",)):
        before, y = x.copy(), np.zeros((1, 12), F32)
        xnki.simulate_kernel(kernel, x, *([] if names else [y]), **dict.fromkeys(names, y))
        np.testing.assert_allclose(y, x.sum(axis=0, keepdims=True), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(x, before)


def test_a_loop_index_may_place_a_matmul_on_a_part_of_the_engine() -> None:
    """As AWS's test of ``nc_matmul``: the position is an expression of a loop's index."""

    def kernel(a: Any, b: Any) -> Any:
        out = xl.ndarray((2, 30, 9), dtype=xl.float32, buffer=xl.shared_hbm)
        for i in xl.affine_range(2):
            xl.store(out[i], xisa.nc_matmul(xl.load(a), xl.load(b), tile_position=(i * 64, 0), tile_size=(64, 64)))
        return out

    a, b = normal(40, 30), normal(40, 9)
    for result in run(kernel, a, b).outputs[0]:
        np.testing.assert_allclose(result, a.T @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["trn2", "trn3"])
def test_a_kernel_may_name_its_device(name: str) -> None:
    with nki_modules():
        import neuronxcc.nki as xnki
    versions = []

    @xnki.jit(platform_target=name)
    def kernel(x: Any) -> None:
        versions.append(xisa.get_nc_version())

    run(kernel, TensorSpec((4, 4)))
    assert versions == [{"trn2": xisa.nc_version.gen3, "trn3": xisa.nc_version.gen4}[name]]
    assert versions[0] >= xisa.nc_version.gen3


def test_a_device_that_the_emulator_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with nki_modules():
        import neuronxcc.nki as xnki

    message = "unknown Neuron device 'trn4': the emulator has inf2, trn1, trn1n, trn2, trn3"
    with pytest.raises(ValueError, match=message):
        xnki.jit(platform_target="trn4")
    for name, core in (("inf2", TRN1), ("trn1n", TRN1), ("trn2", TRN2)):
        assert xnki.jit(lambda x: None, platform_target=name).core is core
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", name)
        assert target_core() is core
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn4")
    with pytest.raises(ValueError, match=message):
        target_core()
