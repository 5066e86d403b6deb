"""Every rule of the emulator: a small kernel breaks it; the error names this file, the line, limit and actual value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from neuronmm.emulator.nki import NkiError, TensorSpec, nki_modules, run
from neuronmm.emulator.nki.trace import Engine
from neuronmm.kernels.hardware import TRN2
from nki_violations import F32, assert_breaks, psum, sbuf, violations

with nki_modules():
    import neuronxcc.nki.isa as xisa
    import neuronxcc.nki.language as xl
    import nki.isa as nisa
    import nki.language as nl


def too_many_partitions(x: Any) -> None:
    nl.ndarray((129, 4), dtype=F32, buffer=nl.sbuf)  # broken: partitions


def tile_beyond_a_partition(x: Any) -> None:
    nl.ndarray((128, 50_000), dtype=F32, buffer=nl.sbuf)  # broken: free size


def stationary_too_wide(x: Any) -> None:
    nisa.nc_matmul(psum(128, 4), sbuf(128, 129), sbuf(128, 4))  # broken: stationary size


def moving_too_wide(x: Any) -> None:
    nisa.nc_matmul(psum(128, 513), sbuf(128, 128), sbuf(128, 513))  # broken: moving size


def contraction_differs(x: Any) -> None:
    nisa.nc_matmul(psum(8, 4), sbuf(128, 8), sbuf(64, 4))  # broken: contraction


def matmul_to_sbuf(x: Any) -> None:
    nisa.nc_matmul(sbuf(8, 4), sbuf(128, 8), sbuf(128, 4))  # broken: operand space


def matmul_from_psum(x: Any) -> None:
    nisa.nc_matmul(psum(8, 4), psum(128, 8), sbuf(128, 4))  # broken: operand space


def matmul_from_hbm(x: Any) -> None:
    nisa.nc_matmul(psum(8, 4), x[0:64, 0:8], sbuf(64, 4))  # broken: operand space


def transposing_dma_to_the_shape_of_its_source(x: Any) -> None:
    nisa.dma_transpose(sbuf(64, 128), x)  # broken: shape


def wrong_result_shape(x: Any) -> None:
    nisa.nc_matmul(psum(4, 8), sbuf(128, 8), sbuf(128, 4))  # broken: result shape


def matmul_result_over_two_banks(x: Any) -> None:
    nisa.nc_matmul(psum(8, 600)[0:8, 500:520], sbuf(128, 8), sbuf(128, 20))  # broken: psum bank


def matmul_results_overlap(x: Any) -> None:
    acc = psum(8, 8)
    nisa.nc_matmul(acc[0:8, 0:4], sbuf(128, 8), sbuf(128, 4))
    nisa.nc_matmul(acc[0:8, 2:6], sbuf(128, 8), sbuf(128, 4))  # broken: accumulation group


def start_partition_not_allowed(x: Any) -> None:
    nisa.tensor_copy(sbuf(128, 4)[16:32, 0:4], sbuf(16, 4))  # broken: start partition


def too_many_partitions_from_the_start(x: Any) -> None:
    nisa.tensor_copy(sbuf(128, 4)[32:128, 0:4], sbuf(96, 4))  # broken: start partition


def every_other_partition(x: Any) -> None:
    nisa.tensor_copy(sbuf(16, 4), sbuf(32, 4)[0:32:2, 0:4])  # broken: partition stride


def every_other_partition_by_pattern(x: Any) -> None:
    nisa.tensor_copy(sbuf(8, 32), sbuf(16, 32).ap([[64, 8], [1, 32]]))  # broken: partition stride


def stride_beyond_16_bits(x: Any) -> None:
    nisa.tensor_copy(sbuf(128, 2), sbuf(128, 40_000, dtype=nl.bfloat16)[0:128, ::32_768])  # broken: stride


def dma_from_psum(x: Any) -> None:
    nisa.dma_copy(dst=x[0:8, 0:4], src=psum(8, 4))  # broken: operand space


def dma_sizes_differ(x: Any) -> None:
    nisa.dma_copy(dst=sbuf(64, 4), src=x[0:64, 0:8])  # broken: shape


def vector_reads_hbm(x: Any) -> None:
    nisa.tensor_copy(sbuf(64, 128), x)  # broken: operand space


def gpsimd_reads_psum(x: Any) -> None:
    a, b = psum(8, 4), sbuf(8, 4)
    nisa.tensor_tensor(sbuf(8, 4), a, b, op=nl.add, engine=nisa.engine.gpsimd)  # broken: operand space


def both_in_psum(x: Any) -> None:
    nisa.tensor_tensor(sbuf(8, 4), psum(8, 4), psum(8, 4), op=nl.add)  # broken: operand space


def operand_shapes(x: Any) -> None:
    nisa.tensor_tensor(sbuf(8, 4), sbuf(8, 4), sbuf(8, 3), op=nl.add)  # broken: shape


def broadcast_column(x: Any) -> None:
    nisa.tensor_tensor(sbuf(8, 4), sbuf(8, 4), sbuf(8, 1), op=nl.add)  # broken: shape


def broadcast_reciprocal(x: Any) -> None:
    nisa.reciprocal(sbuf(8, 4), sbuf(8, 1))  # broken: shape


def broadcast_activation(x: Any) -> None:
    nisa.activation(sbuf(8, 4), op=nl.exp, data=sbuf(8, 1))  # broken: shape


def out_of_bounds(x: Any) -> None:
    nisa.dma_copy(dst=sbuf(64, 100), src=x[0:64, 100:200])  # broken: out of bounds


def out_of_bounds_pattern(x: Any) -> None:
    nisa.dma_copy(dst=sbuf(64, 128), src=x.ap([[128, 64], [1, 128]], offset=1))  # broken: out of bounds


def out_of_bounds_grid(x: Any) -> None:
    i, j = xl.mgrid[0:128, 0:4]
    xl.load(x[i, j])  # broken: out of bounds


def write_of_an_element_twice(x: Any) -> None:
    nisa.dma_copy(dst=x.ap([[64, 4], [1, 128]]), src=sbuf(4, 128))  # broken: overlapping write


def write_overlaps_its_source(x: Any) -> None:
    t = sbuf(8, 16)
    nisa.tensor_copy(t[0:8, 1:9], t[0:8, 0:8])  # broken: overlapping write


def power_reads_psum(x: Any) -> None:
    nisa.tensor_tensor(sbuf(8, 4), psum(8, 4), sbuf(8, 4), op=nl.power)  # broken: operand space


def power_writes_psum(x: Any) -> None:
    nisa.tensor_tensor(psum(8, 4), sbuf(8, 4), sbuf(8, 4), op=nl.power)  # broken: operand space


def power_of_psum_by_a_number(x: Any) -> None:
    data = xl.ndarray((8, 4), F32, buffer=xl.psum)
    xisa.tensor_scalar(data, xl.add, 1.0, op1=xl.power, operand1=-0.5)  # broken: operand space


def activation_the_table_lacks(x: Any) -> None:
    nisa.activation(sbuf(8, 4), op=nl.cos, data=sbuf(8, 4))  # broken: activation


def activation_by_a_binary_operator(x: Any) -> None:
    xisa.activation(op=xl.maximum, data=xl.ndarray((8, 4), F32))  # broken: activation


def bias_must_be_a_column(x: Any) -> None:
    nisa.activation(sbuf(8, 4), op=nl.exp, data=sbuf(8, 4), bias=sbuf(8, 4))  # broken: shape


def bias_must_be_a_tile_on_v2(x: Any) -> None:
    nisa.activation(sbuf(8, 4), op=nl.exp, data=sbuf(8, 4), bias=1.0)  # broken: operand


def scalar_engine_of_v2_copies_only_by_activation(x: Any) -> None:
    nisa.tensor_copy(sbuf(8, 4), sbuf(8, 4), engine=nisa.scalar_engine)  # broken: engine


def reduction_over_partitions(x: Any) -> None:
    nisa.tensor_reduce(sbuf(1, 4), nl.add, sbuf(8, 4), axis=0)  # broken: reduction axis


def transpose_too_wide(x: Any) -> None:
    nisa.nc_transpose(psum(128, 4), sbuf(4, 512))  # broken: stationary size


def partitions_are_the_first_axis(x: Any) -> None:
    t = xl.ndarray((4, xl.par_dim(128), 8), dtype=F32)
    xisa.tensor_copy(t[:, 0, :])  # broken: partition axis


def assigned_result_shape(x: Any) -> None:
    xl.ndarray((8, 8), dtype=F32)[...] = xisa.tensor_copy(xl.ndarray((8, 4), dtype=F32))  # broken: result shape


def matmul_assigned_to_sbuf(x: Any) -> None:
    product = xisa.nc_matmul(xl.ndarray((128, 8), F32), xl.ndarray((128, 4), F32))
    xl.ndarray((8, 4), dtype=F32)[...] = product  # broken: operand space


def load_assigned_to_psum(x: Any) -> None:
    xl.ndarray((64, 128), dtype=F32, buffer=xl.psum)[...] = xl.load(x)  # broken: operand space


def masked_matmul(x: Any) -> None:
    i = xl.arange(128)[:, None]
    xisa.nc_matmul(xl.ndarray((128, 8), F32), xl.ndarray((128, 4), F32), mask=i < 5)  # broken: unsupported


def one_axis_grid_on_chip(x: Any) -> None:
    xl.ndarray((128, 4), dtype=F32)[xl.arange(64), 0]  # broken: 1-D index


def one_axis_grid_in_hbm(x: Any) -> None:
    x[xl.arange(64)[:, None], xl.arange(8)]  # broken: 1-D index


def grid_beside_a_slice(x: Any) -> None:
    x[xl.arange(64)[:, None], :]  # broken: mixed index


def grid_beside_a_dynamic_slice(x: Any) -> None:
    x[xl.ds(0, 8), xl.arange(8)[None, :]]  # broken: mixed index


def grid_beside_an_ellipsis(x: Any) -> None:
    x[xl.arange(64)[:, None], ...]  # broken: mixed index


BROKEN = violations(globals())


@pytest.mark.parametrize("data", [True, False], ids=["data", "shapes"])
@pytest.mark.parametrize("kernel", BROKEN, ids=lambda f: f.__name__)
def test_each_violation_names_file_and_line(kernel: Callable[..., None], data: bool) -> None:
    x = np.zeros((64, 128), F32) if data else TensorSpec((64, 128))
    assert_breaks(kernel, x)


@pytest.mark.parametrize(
    ("kernel", "rule", "limit", "actual"),
    [
        (too_many_partitions, "partitions", 128, 129),
        (stationary_too_wide, "stationary size", 128, 129),
        (moving_too_wide, "moving size", 512, 513),
        (too_many_partitions_from_the_start, "start partition", 32, 96),
        (every_other_partition, "partition stride", 1, 2),
        (stride_beyond_16_bits, "stride", 32_767, 32_768),
        (tile_beyond_a_partition, "free size", 176 * 1024, 200_000),
        (out_of_bounds, "out of bounds", 127, 199),
        (matmul_result_over_two_banks, "psum bank", 2048, 80),
    ],
)
def test_the_error_has_limit_and_actual_value(kernel: Callable[..., None], rule: str, limit: int, actual: int) -> None:
    with pytest.raises(NkiError) as caught:
        run(kernel, TensorSpec((64, 128)))
    assert (caught.value.rule, caught.value.limit, caught.value.actual) == (rule, limit, actual)
    assert f"limit: {limit}; actual: {actual}" in str(caught.value)


@pytest.mark.parametrize("kernel", [bias_must_be_a_tile_on_v2, scalar_engine_of_v2_copies_only_by_activation])
def test_v3_allows_what_v2_does_not(kernel: Callable[..., None]) -> None:
    run(kernel, TensorSpec((64, 128)), core=TRN2)


def test_strides_within_16_bits_are_accepted() -> None:
    def kernel(x: Any) -> None:
        t = sbuf(128, 2, 40_000, dtype=nl.bfloat16)
        nisa.memset(t, 0.0)  # its free axes are contiguous
        nisa.tensor_copy(sbuf(128, 2), t[0:128, 0, 0:40_000:32_767])
        nisa.dma_copy(dst=t[0:4, 0:2, 0], src=t[64:72:2, 0:2, 1])  # a DMA has no stride limit

    run(kernel, TensorSpec((64, 128)))


def test_the_first_dialect_accepts_a_bfloat16_operand_column_and_power_in_sbuf() -> None:
    def kernel(x: Any) -> None:
        tile, column = xl.ndarray((8, 4), F32), xl.ndarray((8, 1), xl.bfloat16)
        xisa.tensor_scalar(tile, xl.multiply, column)
        xisa.tensor_tensor(tile, xl.cos(tile), op=xl.power)

    trace = run(kernel, TensorSpec((64, 128))).trace
    assert [(i.op, i.engine) for i in trace.instructions][1:] == [("cos", Engine.SCALAR), ("power", Engine.GPSIMD)]


def test_the_location_names_the_file_that_ran() -> None:
    source = "def kernel(x):\n    nl.ndarray((129, 4), dtype='float32', buffer=nl.sbuf)\n"
    for file in ("one.py", "copy_of_one.py"):
        names: dict[str, Any] = {"nl": nl}
        exec(compile(source, file, "exec"), names)
        with pytest.raises(NkiError) as caught:
            run(names["kernel"], TensorSpec((4, 4)))
        assert caught.value.location == f"{file}:2"


def allocating_kernel(buffers: int, space: Any, columns: int, together: bool) -> Callable[[Any], None]:
    """Return a kernel with ``buffers`` tiles, live ``together`` or one after the other."""

    def kernel(x: Any) -> None:
        tiles = []
        for _ in nl.static_range(buffers):
            tile = nl.ndarray((128, columns), dtype=F32, buffer=space)
            nisa.memset(tile, 0.0)
            if together:
                tiles.append(tile)
        for tile in tiles:
            nisa.tensor_copy(sbuf(128, 1), tile[0:128, 0:1])

    return kernel


@pytest.mark.parametrize(
    ("space", "columns", "fits"),
    [(nl.sbuf, 12_000, 3), (nl.psum, 512, 8), (nl.psum, 10, 8)],
    ids=["sbuf", "psum", "bank"],
)
def test_capacity_counts_live_ranges(space: Any, columns: int, fits: int) -> None:
    x = TensorSpec((64, 128))
    run(allocating_kernel(fits, space, columns, together=True), x)
    run(allocating_kernel(3 * fits, space, columns, together=False), x)
    with pytest.raises(NkiError, match="capacity") as caught:
        run(allocating_kernel(fits + 1, space, columns, together=True), x)
    assert caught.value.location.startswith(__file__)
    assert run(allocating_kernel(fits + 1, space, columns, together=True), x, capacity=False).trace.instructions
