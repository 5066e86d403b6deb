"""Which dtypes an operand may have, and which results: a small kernel breaks each rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from neuronmm.emulator.nki import TensorSpec, nki_modules
from nki_violations import F32, assert_breaks, psum, sbuf, violations

with nki_modules():
    import neuronxcc.nki.isa as xisa
    import neuronxcc.nki.language as xl
    import nki.isa as nisa
    import nki.language as nl


def matmul_result_in_bfloat16(x: Any) -> None:
    acc = nl.ndarray((8, 4), dtype=nl.bfloat16, buffer=nl.psum)
    nisa.nc_matmul(acc, sbuf(128, 8), sbuf(128, 4))  # broken: result dtype


def mixed_precision(x: Any) -> None:
    nisa.nc_matmul(psum(8, 4), sbuf(128, 8), sbuf(128, 4, dtype=nl.bfloat16))  # broken: operand dtype


def matmul_of_integers(x: Any) -> None:
    nisa.nc_matmul(psum(8, 4), sbuf(128, 8, dtype=np.int8), sbuf(128, 4, dtype=np.int8))  # broken: operand dtype


def predicate_of_signed_integers(x: Any) -> None:
    nisa.tensor_copy_predicated(sbuf(8, 4), sbuf(8, 4), sbuf(8, 4, dtype=np.int8))  # broken: operand dtype


def predicated_copy_to_another_dtype(x: Any) -> None:
    dst, predicate = sbuf(8, 4, dtype=nl.bfloat16), sbuf(8, 4, dtype=np.uint8)
    nisa.tensor_copy_predicated(dst, sbuf(8, 4), predicate)  # broken: operand dtype


def selection_by_32_bits(x: Any) -> None:
    nisa.select_reduce(sbuf(8, 4), sbuf(8, 4, dtype=np.uint32), sbuf(8, 4), 0.0)  # broken: operand dtype


def selection_of_32_bit_integers(x: Any) -> None:
    integers = sbuf(8, 4, dtype=np.int32)
    nisa.select_reduce(sbuf(8, 4), sbuf(8, 4, dtype=np.uint8), integers, 0.0)  # broken: operand dtype


def maximum_in_integers(x: Any) -> None:
    reset, column = nisa.reduce_cmd.reset_reduce, sbuf(8, 1, dtype=np.int16)
    nisa.select_reduce(sbuf(8, 4), sbuf(8, 4, dtype=np.uint8), sbuf(8, 4), 0.0, column, reset)  # broken: operand dtype


def positions_in_float(x: Any) -> None:
    nisa.nc_find_index8(sbuf(8, 8), sbuf(8, 16), sbuf(8, 8))  # broken: operand dtype


def shuffle_to_another_dtype(x: Any) -> None:
    nisa.nc_stream_shuffle(sbuf(32, 4, dtype=nl.bfloat16), sbuf(32, 4), list(range(32)))  # broken: operand dtype


def transposing_dma_to_another_dtype(x: Any) -> None:
    nisa.dma_transpose(sbuf(128, 64, dtype=nl.bfloat16), x)  # broken: operand dtype


def scale_must_be_float32(x: Any) -> None:
    scale = sbuf(8, 1, dtype=nl.bfloat16)
    nisa.activation(sbuf(8, 4), op=nl.exp, data=sbuf(8, 4), scale=scale)  # broken: operand dtype


def operand_column_must_be_float32(x: Any) -> None:
    nisa.tensor_scalar(sbuf(8, 4), sbuf(8, 4), nl.multiply, sbuf(8, 1, dtype=nl.bfloat16))  # broken: operand dtype


def second_operand_column_must_be_float32(x: Any) -> None:
    column = sbuf(8, 1, dtype=nl.bfloat16)
    nisa.tensor_scalar(sbuf(8, 4), sbuf(8, 4), nl.add, 1.0, False, nl.add, column)  # broken: operand dtype


def replaced_positions_in_float(x: Any) -> None:
    nisa.nc_match_replace8(sbuf(8, 16), sbuf(8, 16), sbuf(8, 8), 0.0, sbuf(8, 8))  # broken: operand dtype


def replaced_positions_in_signed_integers(x: Any) -> None:
    data, values, positions = xl.ndarray((8, 16), F32), xl.ndarray((8, 8), F32), xl.ndarray((8, 8), xl.int32)
    xisa.nc_match_replace8(data=data, vals=values, imm=0.0, dst_idx=positions)  # broken: operand dtype


def affine_selection_of_32_bit_integers(x: Any) -> None:
    p, f = xl.mgrid[0:8, 0:4]
    xisa.affine_select(f <= p, xl.ndarray((8, 4), xl.int32), 0.0)  # broken: operand dtype


def affine_selection_into_32_bit_integers(x: Any) -> None:
    nisa.affine_select(sbuf(8, 4, dtype=np.uint32), [[1, 4]], 0, sbuf(8, 4), 0.0)  # broken: operand dtype


BROKEN = violations(globals())


@pytest.mark.parametrize("data", [True, False], ids=["data", "shapes"])
@pytest.mark.parametrize("kernel", BROKEN, ids=lambda f: f.__name__)
def test_each_violation_names_file_and_line(kernel: Callable[..., None], data: bool) -> None:
    assert_breaks(kernel, np.zeros((64, 128), F32) if data else TensorSpec((64, 128)))
