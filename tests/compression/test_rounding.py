"""Stochastic rounding: neighbours only, right on average, and what it saves of a recovery."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.pipeline import compress
from neuronmm.compression.recovery import Recovery, recover
from neuronmm.compression.rounding import round_stochastically
from tiny import make_tokens

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


def test_a_recovery_of_small_steps_keeps_its_gain_in_bf16(
    dense: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    source, folder = dense(dtype=torch.bfloat16), tmp_path / "low"
    usual: dict[str, Any] = {"ratio": 0.5, "align": 2, "calibration": str(text), "calibration_length": 16}
    compress(source, folder, CompressionConfig.build(None, **usual, refine="off", share="off"))
    settings = Recovery(rank=4, learning_rate=3e-5, epochs=2, batch=8)
    done = recover(folder, make_tokens(32, 20), settings, lambda stage, share: None, dense=source)
    trained = done["loss_before"] - min(done["stages"][-1]["losses"])
    stored = done["loss_before"] - done["loss_after"]
    assert stored > 0.6 * trained > 0, "to the nearest it would be a quarter"
