"""Which engine may write where, and what a matmul may add to: a small kernel breaks each rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from neuronmm.emulator.nki import TensorSpec, nki_modules, run
from neuronmm.emulator.nki.trace import Engine
from nki_violations import F32, assert_breaks, psum, sbuf

with nki_modules():
    import neuronxcc.nki.isa as xisa
    import neuronxcc.nki.language as xl
    import nki.isa as nisa
    import nki.language as nl


def accumulate_on_unwritten_psum(x: Any) -> None:
    nisa.nc_matmul(psum(8, 4), sbuf(128, 8), sbuf(128, 4), accumulate=True)  # broken: accumulate


def accumulate_on_memset(x: Any) -> None:
    acc = psum(8, 4)
    nisa.memset(acc, 0.0)
    nisa.nc_matmul(acc, sbuf(128, 8), sbuf(128, 4))  # broken: accumulate


def accumulate_on_a_part_that_a_memset_wrote(x: Any) -> None:
    whole = psum(8, 8)
    for part in (whole[:, 0:4], whole[:, 4:8]):
        nisa.nc_matmul(part, sbuf(128, 8), sbuf(128, 4))
    nisa.memset(whole, 7.0)
    nisa.nc_matmul(whole[:, 0:4], sbuf(128, 8), sbuf(128, 4), accumulate=True)  # broken: accumulate


def accumulate_on_a_whole_of_which_a_memset_wrote_the_last_part(x: Any) -> None:
    whole = psum(8, 8)
    nisa.nc_matmul(whole[:, 0:4], sbuf(128, 8), sbuf(128, 4))
    nisa.memset(whole[:, 4:8], 7.0)
    nisa.nc_matmul(whole, sbuf(128, 8), sbuf(128, 8), accumulate=True)  # broken: accumulate


def accumulate_on_a_whole_of_which_a_part_is_unwritten(x: Any) -> None:
    whole = psum(8, 8)
    nisa.nc_matmul(whole[:, 0:4], sbuf(128, 8), sbuf(128, 4))
    nisa.nc_matmul(whole, sbuf(128, 8), sbuf(128, 8), accumulate=True)  # broken: accumulate


def load_assigned_to_a_parameter(x: Any) -> None:
    x[0:64, 0:128] = xl.load(x[0:64, 0:128])  # broken: operand space


def load_assigned_beyond_a_tile(x: Any) -> None:
    tile = xl.ndarray((32, 128), F32)
    p, f = xl.arange(64)[:, None], xl.arange(128)[None, :]
    tile[p, f] = xl.load(x[p, f])  # broken: out of bounds


def gpsimd_result_assigned_to_psum(x: Any) -> None:
    tile = xl.ndarray((8, 4), F32)
    xl.ndarray((8, 4), F32, buffer=xl.psum)[...] = xisa.tensor_tensor(tile, tile, op=xl.power)  # broken: operand space


def subtraction_on_the_scalar_engine(x: Any) -> None:
    nisa.tensor_scalar(sbuf(8, 4), sbuf(8, 4), nl.subtract, 1.0, engine=nisa.scalar_engine)  # broken: engine


def addition_and_multiplication_on_the_scalar_engine(x: Any) -> None:
    tile, column = xl.ndarray((8, 4), F32), xl.ndarray((8, 1), F32)
    xisa.tensor_scalar(tile, np.add, column, op1=np.multiply, operand1=2.0, engine=xisa.scalar_engine)  # broken: engine


def transpose_of_another_engine(x: Any) -> None:
    nisa.nc_transpose(psum(4, 8), sbuf(8, 4), engine=nisa.gpsimd_engine)  # broken: engine


def transpose_of_another_engine_in_the_first_dialect(x: Any) -> None:
    xisa.nc_transpose(xl.ndarray((8, 4), F32), engine=xisa.gpsimd_engine)  # broken: engine


def large_transpose_on_the_vector_engine(x: Any) -> None:
    nisa.nc_transpose(sbuf(33, 8), sbuf(8, 33), engine=nisa.vector_engine)  # broken: transpose size


def transpose_of_many_partitions_on_the_vector_engine(x: Any) -> None:
    xisa.nc_transpose(xl.ndarray((33, 8), F32), engine=xisa.vector_engine)  # broken: transpose size


def wide_transpose_on_the_vector_engine(x: Any) -> None:
    xisa.nc_transpose(xl.ndarray((8, 200), F32), engine=xisa.vector_engine)  # broken: transpose size


def large_transpose_to_sbuf(x: Any) -> None:
    nisa.nc_transpose(sbuf(33, 8), sbuf(8, 33))  # broken: transpose size


def transpose_in_place(x: Any) -> None:
    tile = sbuf(8, 8)
    nisa.nc_transpose(tile, tile, engine=nisa.vector_engine)  # broken: overlapping write


def transpose_on_the_vector_engine_into_a_larger_tile(x: Any) -> None:
    nisa.nc_transpose(sbuf(8, 8), sbuf(8, 4), engine=nisa.vector_engine)  # broken: result shape


def transpose_on_the_vector_engine_into_another_dtype(x: Any) -> None:
    wide = nl.ndarray((4, 8), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.nc_transpose(wide, sbuf(8, 4), engine=nisa.vector_engine)  # broken: result dtype


BROKEN = [
    accumulate_on_unwritten_psum,
    accumulate_on_memset,
    accumulate_on_a_part_that_a_memset_wrote,
    accumulate_on_a_whole_of_which_a_memset_wrote_the_last_part,
    accumulate_on_a_whole_of_which_a_part_is_unwritten,
    load_assigned_to_a_parameter,
    load_assigned_beyond_a_tile,
    gpsimd_result_assigned_to_psum,
    subtraction_on_the_scalar_engine,
    addition_and_multiplication_on_the_scalar_engine,
    transpose_of_another_engine,
    transpose_of_another_engine_in_the_first_dialect,
    large_transpose_on_the_vector_engine,
    transpose_of_many_partitions_on_the_vector_engine,
    wide_transpose_on_the_vector_engine,
    large_transpose_to_sbuf,
    transpose_in_place,
    transpose_on_the_vector_engine_into_a_larger_tile,
    transpose_on_the_vector_engine_into_another_dtype,
]


@pytest.mark.parametrize("data", [True, False], ids=["data", "shapes"])
@pytest.mark.parametrize("kernel", BROKEN, ids=lambda kernel: kernel.__name__)
def test_each_violation_names_file_and_line(kernel: Callable[..., None], data: bool) -> None:
    assert_breaks(kernel, np.zeros((64, 128), F32) if data else TensorSpec((64, 128)))


def test_the_scalar_engine_multiplies_then_adds() -> None:
    def kernel(x: Any) -> Any:
        tile, result, out = xl.load(x), sbuf(8, 4), nl.ndarray((8, 4), dtype=F32, buffer=nl.shared_hbm)
        nisa.tensor_scalar(result, tile, nl.multiply, 2.0, op1=nl.add, operand1=1.0, engine=nisa.scalar_engine)
        nisa.tensor_scalar(result, result, nl.add, 0.5, engine=nisa.scalar_engine)
        nisa.tensor_scalar(result, result, nl.multiply, 4.0, engine=nisa.scalar_engine)
        xl.store(out, result)
        return out

    x = np.arange(32, dtype=F32).reshape(8, 4)
    result = run(kernel, x)
    np.testing.assert_array_equal(result.outputs[0], (2 * x + 1.5) * 4)
    engines = [i.engine for i in result.trace.instructions if i.op == "tensor_scalar"]
    assert engines == [Engine.SCALAR] * 3
