"""Matrices of few bits: the rounding error and its bound, exact cases, and dequantisation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draws import examples
from neuronmm.kernels import quantise, quantise_int4
from neuronmm.kernels.low_bits import GROUP, dense

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@examples(60)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(-150, 120), st.sampled_from(DTYPES))
def test_no_element_is_off_by_more_than_half_a_step(rows: int, cols: int, power: int, dtype: torch.dtype) -> None:
    power = max(power, -20) if dtype == torch.float16 else power
    power = min(power, 10) if dtype == torch.float16 else power
    weight = (torch.randn(rows, cols) * 2.0**power).to(dtype)
    weight[0] = 0
    values, scales = quantise(weight)
    wide = weight.double()
    smallest = torch.finfo(torch.float32).tiny
    assert torch.equal(scales, (wide.abs().amax(1) / 127).float().clamp_min(smallest))
    # Half a step, plus the fp32 rounding of up to 127 steps.
    bound = (0.5 + 127 * 2.0**-22) * scales[:, None].double()
    assert ((values.double() * scales[:, None].double() - wide).abs() <= bound).all()
    assert values.dtype == torch.int8 and values.abs().max() <= 127
    assert not values[0].any()


def test_the_largest_of_a_row_is_exact_and_signs_are_symmetric() -> None:
    weight = torch.tensor([[1.0, -0.5, 0.25], [-3.0, 3.0, 0.0]])
    values, scales = quantise(weight)
    assert values.tolist() == [[127, -64, 32], [-127, 127, 0]]
    assert torch.equal(quantise(-weight).values, -values) and torch.equal(quantise(-weight).scales, scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantisation_rounds_once(dtype: torch.dtype) -> None:
    int8 = quantise(torch.randn(9, 33))
    assert int8.shape == (9, 33)
    exact = int8.values.float() * int8.scales[:, None]
    assert torch.equal(int8.dequantise(dtype), exact.to(dtype)) and dense(int8, dtype).dtype == dtype
    weight = torch.randn(3, 3)
    assert dense(weight, dtype) is weight


@examples(60)
@given(st.integers(1, 40), st.integers(1, 200), st.integers(-150, 120), st.sampled_from(DTYPES))
def test_no_element_of_int4_is_off_by_more_than_its_bound(rows: int, cols: int, power: int, dtype: torch.dtype) -> None:
    """Half a step of the group for q; half a scale for the step, 15 times; half of 16 scales for the offset."""
    power = min(max(power, -20), 10) if dtype == torch.float16 else power
    weight = (torch.randn(rows, cols) * torch.rand(rows, cols) * 2.0**power + 2.0 ** (power - 1)).to(dtype)
    weight[0] = 0
    int4 = quantise_int4(weight)
    assert int4.shape == weight.shape and int4.values.shape == (rows, -(-cols // 64) * 36)
    error = (int4.integers().double() * int4.scales[:, None].double() - weight.double()).abs()
    for start in range(0, cols, GROUP):
        group = weight[:, start : start + GROUP].double()
        step = (group.amax(1).clamp_min(0) - group.amin(1).clamp_max(0)) / 15
        bound = step / 2 + 16 * int4.scales.double()
        assert (error[:, start : start + GROUP] <= (bound * (1 + 2.0**-20))[:, None]).all()
    assert not int4.integers()[0].any()


def test_levels_of_other_4_bit_formats_are_nearly_kept() -> None:
    """Groups of 16 levels with a step and an offset of their own, as Q4_1 and Q4_K have them."""
    torch.manual_seed(0)
    levels = torch.randint(0, 16, (8, 18, GROUP)).float()
    steps, offsets = 0.5 + torch.rand(8, 18, 1), 3 + 10 * torch.rand(8, 18, 1)
    weight = ((levels - offsets.round()) * steps).flatten(1)
    other = torch.randn(weight.shape) * weight.std()
    nearly, in_general = (((quantise_int4(w).dequantise(torch.float32) - w).norm() / w.norm()) for w in (weight, other))
    assert nearly < in_general / 2


def test_int4_packs_halves_and_groups_in_the_documented_order() -> None:
    weight = torch.zeros(1, 70)
    weight[0, 1], weight[0, 33], weight[0, 69], weight[0, 68] = 15.0, 30.0, -30.0, 15.0
    values, scales, columns = quantise_int4(weight)
    assert columns == 70 and torch.equal(scales, torch.tensor([3.0 / 255]))
    # Block 0: the halves of columns 1 and 33; block 1: those of 68 and 69 above a zero of 10.
    assert values[0, 1] == 15 + 16 * 15 and values[0, [0, 2, 3, 31]].tolist() == [0, 0, 0, 0]
    assert values[0, 32 + 4] == 15 and values[0, 32 + 5] == 0 and values[0, 32 + 3] == 10
    assert values[0, 64:].tolist() == [85, 0, 170, 0, 255, 159, 1, 0]
    assert int(quantise_int4(weight).integers()[0, 69]) == -16 * 159
