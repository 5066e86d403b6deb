"""The size of a destination, the axes of a reduction, and what a kernel may do with a result: a kernel breaks each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from neuronmm.emulator.nki import TensorSpec, nki_modules, run
from nki_violations import F32, assert_breaks, sbuf, violations

with nki_modules():
    import neuronxcc.nki.isa as xisa
    import neuronxcc.nki.language as xl
    import nki.isa as nisa
    import nki.language as nl

U32 = np.uint32


def reduction_moves_partitions(x: Any) -> None:
    nisa.tensor_reduce(sbuf(32, 8), nl.add, sbuf(64, 4, 8), axis=2)  # broken: result shape


def reduction_keeps_too_much(x: Any) -> None:
    nisa.tensor_reduce(sbuf(64, 4), nl.add, sbuf(64, 4, 8), axis=(1, 2))  # broken: result shape


def reduction_of_partitions_keeps_them(x: Any) -> None:
    data = sbuf(8, 4)
    nisa.max8(sbuf(4, 8), sbuf(4, 16))
    nisa.tensor_reduce(data, nl.add, data, axis=1)  # broken: result shape


def largest_into_a_transposed_tile(x: Any) -> None:
    nisa.max8(sbuf(8, 4), sbuf(4, 16))  # broken: result shape


def indices_into_a_wide_tile(x: Any) -> None:
    nisa.nc_find_index8(sbuf(4, 16, dtype=U32), sbuf(4, 16), sbuf(4, 8))  # broken: result shape


def four_searched_values(x: Any) -> None:
    nisa.nc_find_index8(sbuf(4, 8, dtype=U32), sbuf(4, 16), sbuf(4, 4))  # broken: shape


def four_replaced_values(x: Any) -> None:
    nisa.nc_match_replace8(sbuf(4, 16), sbuf(4, 16), sbuf(4, 4), 0.0)  # broken: shape


def values_of_other_partitions(x: Any) -> None:
    nisa.nc_match_replace8(sbuf(4, 16), sbuf(4, 16), sbuf(8, 8), 0.0)  # broken: shape


def replacement_into_another_shape(x: Any) -> None:
    nisa.nc_match_replace8(sbuf(8, 8), sbuf(4, 16), sbuf(4, 8), 0.0)  # broken: result shape


def replaced_positions_in_a_column(x: Any) -> None:
    positions = sbuf(32, 1, dtype=U32)
    nisa.nc_match_replace8(sbuf(4, 16), sbuf(4, 16), sbuf(4, 8), 0.0, positions)  # broken: result shape


def statistics_into_a_transposed_tile(x: Any) -> None:
    nisa.bn_stats(sbuf(6, 8), sbuf(8, 16))  # broken: result shape


def moments_into_a_transposed_tile(x: Any) -> None:
    nisa.bn_aggr(sbuf(2, 8), sbuf(8, 12))  # broken: result shape


def affine_selection_broadcasts(x: Any) -> None:
    nisa.affine_select(sbuf(8, 4), [[1, 4]], 0, sbuf(8, 1), 0.0)  # broken: shape


def affine_selection_by_two_comparisons(x: Any) -> None:
    p, f = xl.mgrid[0:8, 0:4]
    xisa.affine_select((f <= p) & (f > 0), xl.ndarray((8, 4), F32), 0.0)  # broken: predicate


def affine_selection_by_one_of_two_comparisons(x: Any) -> None:
    p, f = xl.mgrid[0:8, 0:4]
    xisa.affine_select((f <= p) | (f == 3), xl.ndarray((8, 4), F32), 0.0)  # broken: predicate


def sum_over_partitions(x: Any) -> None:
    xl.sum(xl.load(x), axis=0)  # broken: reduction axis


def sum_over_an_axis_that_is_not_there(x: Any) -> None:
    xl.sum(xl.load(x), axis=2)  # broken: reduction axis


def sum_over_an_axis_before_the_first(x: Any) -> None:
    xl.sum(xl.load(x), axis=-3)  # broken: reduction axis


def sum_over_an_axis_twice(x: Any) -> None:
    xl.sum(xl.load(x), axis=[1, -1])  # broken: reduction axis


def reduction_over_an_axis_that_is_not_there(x: Any) -> None:
    nisa.tensor_reduce(sbuf(8, 1), nl.add, sbuf(8, 4), axis=3)  # broken: reduction axis


def reduction_over_a_middle_axis(x: Any) -> None:
    nisa.tensor_reduce(sbuf(8, 5), nl.add, sbuf(8, 4, 5), axis=1)  # broken: reduction axis


def reduction_over_a_middle_axis_in_the_first_dialect(x: Any) -> None:
    xisa.tensor_reduce(xl.add, xl.ndarray((8, 4, 5), F32), axis=[1])  # broken: reduction axis


def operands_that_do_not_broadcast(x: Any) -> None:
    xl.add(xl.ndarray((8, 4), F32), xl.ndarray((8, 3), F32))  # broken: shape


def sum_of_tiles_that_do_not_broadcast(x: Any) -> None:
    xl.ndarray((8, 4), F32) + xl.ndarray((4, 8), F32)  # broken: shape


def broadcast_to_fewer_elements(x: Any) -> None:
    xl.broadcast_to(xl.ndarray((8, 4), F32), (8, 1))  # broken: shape


def broadcast_to_fewer_axes(x: Any) -> None:
    xl.ndarray((8, 1, 4), F32).broadcast_to((8, 4))  # broken: shape


def broadcast_of_an_axis_of_another_size(x: Any) -> None:
    xl.ndarray((8, 2), F32).broadcast_to((8, 4))  # broken: shape


def reversed_copy_within_a_tile(x: Any) -> None:
    t = sbuf(8, 16)
    nisa.tensor_copy(t[0:8, 0:4], t[0:8, 5:1:-1])  # broken: overlapping write


def reversed_columns_cross_a_partition(x: Any) -> None:
    t = sbuf(8, 16)
    nisa.tensor_copy(sbuf(4, 4), t.ap([[16, 4], [-1, 4]], offset=17))  # broken: partition axis


def used_after_its_assignment(x: Any) -> None:
    t, r = xl.ndarray((64, 128), F32), xl.exp(xl.load(x))
    t[...] = r
    xl.store(x, r)  # broken: assigned result


def used_after_its_assignment_and_another_allocation(x: Any) -> None:
    t, r = xl.ndarray((64, 128), F32), xl.exp(xl.load(x))
    t[...] = r
    other = xl.ndarray((64, 128), F32)
    other[...] = xl.exp(r)  # broken: assigned result


def view_used_after_the_assignment_of_its_tile(x: Any) -> None:
    t, r = xl.ndarray((64, 128), F32), xl.load(x)
    view = r[:, 0:8]
    t[...] = r
    xl.exp(view)  # broken: assigned result


def product_used_after_its_addition(x: Any) -> None:
    total = xl.zeros((8, 4), F32, buffer=xl.psum)
    product = xisa.nc_matmul(xl.ndarray((128, 8), F32), xl.ndarray((128, 4), F32))
    total += product
    xl.copy(product)  # broken: assigned result


BROKEN = violations(globals())


@pytest.mark.parametrize("data", [True, False], ids=["data", "shapes"])
@pytest.mark.parametrize("kernel", BROKEN, ids=lambda f: f.__name__)
def test_each_violation_names_file_and_line(kernel: Callable[..., None], data: bool) -> None:
    assert_breaks(kernel, np.zeros((64, 128), F32) if data else TensorSpec((64, 128)))


def test_a_reversed_view_is_a_source_and_a_destination() -> None:
    def kernel(x: Any) -> Any:
        tile, out = xl.load(x), nl.ndarray((8, 12), dtype=F32, buffer=nl.shared_hbm)
        target = sbuf(8, 12)
        nisa.tensor_copy(target.ap([[12, 8], [-1, 12]], offset=11), tile)
        nisa.tensor_copy(target.ap([[12, 8], [-1, 4]], offset=3), tile.ap([[12, 8], [-1, 4]], offset=3))
        nisa.dma_copy(dst=out.ap([[-12, 8], [1, 12]], offset=84), src=target)
        return out

    x = np.arange(96, dtype=F32).reshape(8, 12)
    expected = x[::-1, ::-1].copy()
    expected[:, :4] = x[::-1, :4]
    result = run(kernel, x)
    np.testing.assert_array_equal(result.outputs[0], expected)
    regions = [i.writes[0][1:] for i in result.trace.instructions[1:]]
    assert regions == [(0, 8, 0, 48), (0, 8, 0, 16), (0, 8, 0, 48)]
