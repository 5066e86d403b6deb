"""Every rule of the emulator: a small kernel breaks it, and the error names this file, the line, limit and actual."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from neuronmm.emulator.nki import NkiError, TensorSpec, nki_modules, run
from neuronmm.kernels.hardware import TRN2

with nki_modules():
    import neuronxcc.nki.isa as xisa
    import neuronxcc.nki.language as xl
    import nki.isa as nisa
    import nki.language as nl

F32 = np.float32


def sb(*shape: int, dtype: Any = F32) -> Any:
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def ps(*shape: int) -> Any:
    return nl.ndarray(shape, dtype=F32, buffer=nl.psum)


def too_many_partitions(x: Any) -> None:
    nl.ndarray((129, 4), dtype=F32, buffer=nl.sbuf)  # broken


def tile_beyond_a_partition(x: Any) -> None:
    nl.ndarray((128, 50_000), dtype=F32, buffer=nl.sbuf)  # broken


def stationary_too_wide(x: Any) -> None:
    nisa.nc_matmul(ps(128, 4), sb(128, 129), sb(128, 4))  # broken


def moving_too_wide(x: Any) -> None:
    nisa.nc_matmul(ps(128, 513), sb(128, 128), sb(128, 513))  # broken


def contraction_differs(x: Any) -> None:
    nisa.nc_matmul(ps(8, 4), sb(128, 8), sb(64, 4))  # broken


def product_to_sbuf(x: Any) -> None:
    nisa.nc_matmul(sb(8, 4), sb(128, 8), sb(128, 4))  # broken


def product_from_psum(x: Any) -> None:
    nisa.nc_matmul(ps(8, 4), ps(128, 8), sb(128, 4))  # broken


def product_from_hbm(x: Any) -> None:
    nisa.nc_matmul(ps(8, 4), x[0:64, 0:8], sb(64, 4))  # broken


def product_in_bfloat16(x: Any) -> None:
    acc = nl.ndarray((8, 4), dtype=nl.bfloat16, buffer=nl.psum)
    nisa.nc_matmul(acc, sb(128, 8), sb(128, 4))  # broken


def mixed_precision(x: Any) -> None:
    nisa.nc_matmul(ps(8, 4), sb(128, 8), sb(128, 4, dtype=nl.bfloat16))  # broken


def wrong_result_shape(x: Any) -> None:
    nisa.nc_matmul(ps(4, 8), sb(128, 8), sb(128, 4))  # broken


def product_over_two_banks(x: Any) -> None:
    nisa.nc_matmul(ps(8, 600)[0:8, 500:520], sb(128, 8), sb(128, 20))  # broken


def accumulate_on_nothing(x: Any) -> None:
    nisa.nc_matmul(ps(8, 4), sb(128, 8), sb(128, 4), accumulate=True)  # broken


def accumulate_on_memset(x: Any) -> None:
    acc = ps(8, 4)
    nisa.memset(acc, 0.0)
    nisa.nc_matmul(acc, sb(128, 8), sb(128, 4))  # broken


def groups_overlap(x: Any) -> None:
    acc = ps(8, 8)
    nisa.nc_matmul(acc[0:8, 0:4], sb(128, 8), sb(128, 4))
    nisa.nc_matmul(acc[0:8, 2:6], sb(128, 8), sb(128, 4))  # broken


def start_partition(x: Any) -> None:
    nisa.tensor_copy(sb(128, 4)[16:32, 0:4], sb(16, 4))  # broken


def start_partition_reach(x: Any) -> None:
    nisa.tensor_copy(sb(128, 4)[32:128, 0:4], sb(96, 4))  # broken


def dma_from_psum(x: Any) -> None:
    nisa.dma_copy(dst=x[0:8, 0:4], src=ps(8, 4))  # broken


def dma_sizes_differ(x: Any) -> None:
    nisa.dma_copy(dst=sb(64, 4), src=x[0:64, 0:8])  # broken


def vector_reads_hbm(x: Any) -> None:
    nisa.tensor_copy(sb(64, 128), x)  # broken


def gpsimd_reads_psum(x: Any) -> None:
    nisa.tensor_tensor(sb(8, 4), ps(8, 4), sb(8, 4), op=nl.add, engine=nisa.engine.gpsimd)  # broken


def both_in_psum(x: Any) -> None:
    nisa.tensor_tensor(sb(8, 4), ps(8, 4), ps(8, 4), op=nl.add)  # broken


def operand_shapes(x: Any) -> None:
    nisa.tensor_tensor(sb(8, 4), sb(8, 4), sb(8, 3), op=nl.add)  # broken


def out_of_bounds(x: Any) -> None:
    nisa.dma_copy(dst=sb(64, 100), src=x[0:64, 100:200])  # broken


def out_of_bounds_pattern(x: Any) -> None:
    nisa.dma_copy(dst=sb(64, 128), src=x.ap([[128, 64], [1, 128]], offset=1))  # broken


def out_of_bounds_grid(x: Any) -> None:
    i, j = xl.mgrid[0:128, 0:4]
    xl.load(x[i, j])  # broken


def write_names_an_element_twice(x: Any) -> None:
    nisa.dma_copy(dst=x.ap([[64, 4], [1, 128]]), src=sb(4, 128))  # broken


def write_overlaps_its_source(x: Any) -> None:
    t = sb(8, 16)
    nisa.tensor_copy(t[0:8, 1:9], t[0:8, 0:8])  # broken


def scale_must_be_float32(x: Any) -> None:
    nisa.activation(sb(8, 4), op=nl.exp, data=sb(8, 4), scale=sb(8, 1, dtype=nl.bfloat16))  # broken


def bias_must_be_a_column(x: Any) -> None:
    nisa.activation(sb(8, 4), op=nl.exp, data=sb(8, 4), bias=sb(8, 4))  # broken


def bias_must_be_a_tile_on_v2(x: Any) -> None:
    nisa.activation(sb(8, 4), op=nl.exp, data=sb(8, 4), bias=1.0)  # broken


def scalar_engine_of_v2_copies_only_by_activation(x: Any) -> None:
    nisa.tensor_copy(sb(8, 4), sb(8, 4), engine=nisa.scalar_engine)  # broken


def reduction_over_partitions(x: Any) -> None:
    nisa.tensor_reduce(sb(1, 4), nl.add, sb(8, 4), axis=0)  # broken


def transpose_too_wide(x: Any) -> None:
    nisa.nc_transpose(ps(128, 4), sb(4, 512))  # broken


def partitions_are_the_first_axis(x: Any) -> None:
    t = xl.ndarray((4, xl.par_dim(128), 8), dtype=F32)
    xisa.tensor_copy(t[:, 0, :])  # broken


def assigned_result_shape(x: Any) -> None:
    xl.ndarray((8, 8), dtype=F32)[...] = xisa.tensor_copy(xl.ndarray((8, 4), dtype=F32))  # broken


def product_assigned_to_sbuf(x: Any) -> None:
    xl.ndarray((8, 4), dtype=F32)[...] = xisa.nc_matmul(xl.ndarray((128, 8), F32), xl.ndarray((128, 4), F32))  # broken


def load_assigned_to_psum(x: Any) -> None:
    xl.ndarray((64, 128), dtype=F32, buffer=xl.psum)[...] = xl.load(x)  # broken


def masked_product(x: Any) -> None:
    i = xl.arange(128)[:, None]
    xisa.nc_matmul(xl.ndarray((128, 8), F32), xl.ndarray((128, 4), F32), mask=i < 5)  # broken


BROKEN: list[Callable[..., None]] = [
    f for f in list(globals().values()) if inspect.isfunction(f) and list(inspect.signature(f).parameters) == ["x"]
]


@pytest.mark.parametrize("data", [True, False], ids=["data", "shapes"])
@pytest.mark.parametrize("kernel", BROKEN, ids=lambda f: f.__name__)
def test_each_violation_names_file_line_and_figures(kernel: Callable[..., None], data: bool) -> None:
    x = np.zeros((64, 128), F32) if data else TensorSpec((64, 128))
    with pytest.raises(NkiError) as caught:
        run(kernel, x)
    lines, start = inspect.getsourcelines(kernel)
    line = start + next(i for i, text in enumerate(lines) if "# broken" in text)
    assert caught.value.location == f"{__file__}:{line}"
    assert str(caught.value).startswith(f"{__file__}:{line}: ")
    assert caught.value.rule in str(caught.value)


@pytest.mark.parametrize(
    ("kernel", "rule", "limit", "actual"),
    [
        (too_many_partitions, "partitions", 128, 129),
        (stationary_too_wide, "stationary size", 128, 129),
        (moving_too_wide, "moving size", 512, 513),
        (start_partition_reach, "start partition", 32, 96),
        (tile_beyond_a_partition, "free size", 192 * 1024, 200_000),
        (out_of_bounds, "out of bounds", 127, 199),
        (product_over_two_banks, "psum bank", 2048, 80),
    ],
)
def test_limit_and_actual_value_are_given(kernel: Callable[..., None], rule: str, limit: int, actual: int) -> None:
    with pytest.raises(NkiError) as caught:
        run(kernel, TensorSpec((64, 128)))
    assert (caught.value.rule, caught.value.limit, caught.value.actual) == (rule, limit, actual)
    assert f"limit: {limit}; actual: {actual}" in str(caught.value)


@pytest.mark.parametrize("kernel", [bias_must_be_a_tile_on_v2, scalar_engine_of_v2_copies_only_by_activation])
def test_v3_allows_what_v2_does_not(kernel: Callable[..., None]) -> None:
    run(kernel, TensorSpec((64, 128)), core=TRN2)


def test_the_location_is_that_of_the_file_that_ran() -> None:
    source = "def kernel(x):\n    nl.ndarray((129, 4), dtype='float32', buffer=nl.sbuf)\n"
    for file in ("one.py", "copy_of_one.py"):
        names: dict[str, Any] = {"nl": nl}
        exec(compile(source, file, "exec"), names)
        with pytest.raises(NkiError) as caught:
            run(names["kernel"], TensorSpec((4, 4)))
        assert caught.value.location == f"{file}:2"


def holds(buffers: int, space: Any, columns: int, together: bool) -> Callable[[Any], None]:
    """A kernel with ``buffers`` tiles, live ``together`` or one after the other."""

    def kernel(x: Any) -> None:
        tiles = []
        for _ in range(buffers):
            tile = nl.ndarray((128, columns), dtype=F32, buffer=space)
            nisa.memset(tile, 0.0)
            if together:
                tiles.append(tile)
        for tile in tiles:
            nisa.tensor_copy(sb(128, 1), tile[0:128, 0:1])

    return kernel


@pytest.mark.parametrize(
    ("space", "columns", "fits"),
    [(nl.sbuf, 12_000, 4), (nl.psum, 512, 8), (nl.psum, 10, 8)],
    ids=["sbuf", "psum", "bank"],
)
def test_capacity_counts_live_ranges(space: Any, columns: int, fits: int) -> None:
    x = TensorSpec((64, 128))
    run(holds(fits, space, columns, together=True), x)
    run(holds(3 * fits, space, columns, together=False), x)
    with pytest.raises(NkiError, match="capacity") as caught:
        run(holds(fits + 1, space, columns, together=True), x)
    assert caught.value.location.startswith(__file__)
    assert run(holds(fits + 1, space, columns, together=True), x, capacity=False).trace.instructions


def carried(x: Any, out: Any) -> None:
    t = xl.ndarray((64, 1), dtype=F32)
    t[...] = xl.load(x[0:64, 0:1])
    for i in xl.affine_range(4):
        t[...] = xisa.tensor_scalar(t, op0=xl.multiply, operand0=2.0 + i)
    xl.store(out[0:64, 0:1], t)


def overwritten(x: Any, out: Any) -> None:
    for i in xl.affine_range(4):
        xl.store(out[0:64, 0:1], xl.load(x[0:64, i : i + 1]))


def independent(x: Any, out: Any) -> None:
    total = xl.zeros((64, 1), dtype=F32)
    for i in xl.affine_range(4):
        t = xl.load(x[0:64, i : i + 1])
        total += t
        xl.store(out[0:64, i + 1 : i + 2], t)
    xl.store(out[0:64, 0:1], total)


@pytest.mark.parametrize("kernel", [carried, overwritten])
@pytest.mark.parametrize("shuffle", [None, 3])
def test_races_in_affine_range(kernel: Callable[..., None], shuffle: int | None) -> None:
    with pytest.raises(NkiError, match="affine_range") as caught:
        run(kernel, np.zeros((64, 128), F32), outputs=[TensorSpec((64, 8))], shuffle=shuffle)
    assert caught.value.rule == "race" and caught.value.location.startswith(__file__)


def test_independent_iterations_run_in_any_order() -> None:
    x = np.random.default_rng(0).integers(-9, 9, (64, 128)).astype(F32)
    plain = run(independent, x, outputs=[TensorSpec((64, 5))]).outputs[0]
    for seed in range(3):
        np.testing.assert_array_equal(
            plain, run(independent, x, outputs=[TensorSpec((64, 5))], shuffle=seed).outputs[0]
        )
    np.testing.assert_array_equal(plain[:, 0], x[:, :4].sum(1))
