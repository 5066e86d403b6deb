"""Stochastic rounding: neighbours only, and right on average."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuronmm.compression.rounding import round_stochastically

TIMES = 4000
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@given(value=st.floats(-100, 100, width=32), seed=st.integers(0, 3))
def test_each_value_becomes_one_of_its_neighbours_and_their_mean_is_the_value(
    dtype: torch.dtype, value: float, seed: int
) -> None:
    values = torch.full((TIMES,), value)
    rounded = round_stochastically(values, dtype, torch.Generator().manual_seed(seed))
    assert rounded.dtype == dtype
    found = rounded.unique().float()
    if len(found) == 1:
        # The other one was too unlikely to be seen, or the value is there in this dtype.
        assert found[0] == values[0].to(dtype)
        return
    low, high = sorted(found.tolist())
    assert len(found) == 2 and low < value < high
    assert torch.nextafter(found.min().to(dtype), torch.tensor(torch.inf, dtype=dtype)) == found.max()
    share = (value - low) / (high - low)
    # Five standard errors, and some counts more where one of the two is so rare that they are not normal.
    spread = 5 * (share * (1 - share) / TIMES) ** 0.5 + 10 / TIMES
    assert float((rounded == high).float().mean()) == pytest.approx(share, abs=spread)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_what_the_dtype_holds_stays_and_the_callers_tensor_too(dtype: torch.dtype) -> None:
    values = torch.cat([torch.zeros(64), torch.randn(64, generator=torch.Generator().manual_seed(0))]).to(dtype).float()
    before = values.clone()
    rounded = round_stochastically(values, dtype, torch.Generator())
    assert torch.equal(rounded.float(), before)
    rounded.zero_()
    assert torch.equal(values, before)
