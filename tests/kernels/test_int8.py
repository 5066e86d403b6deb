"""Int8 matrices: the rounding error and its bound, exact cases, and dequantisation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draws import examples
from neuronmm.kernels import quantise
from neuronmm.kernels.int8 import dense

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
