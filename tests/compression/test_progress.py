"""The shares of every stage that a run reports add up to one, whatever it leaves out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from compression_runs import EVERYTHING, config
from neuronmm.compression.pipeline import compress


@pytest.mark.parametrize("ratio", [0.05, 0.2])
def test_every_stage_ends_at_one(ratio: float, dense: Callable[..., Path], tmp_path: Path) -> None:
    """At 0.05 one layer stays whole: nothing of it is refined."""
    shares: dict[str, float] = defaultdict(float)

    def progress(stage: str, share: float) -> None:
        shares[stage] += share

    report = compress(dense(), tmp_path / "out", config(ratio=ratio, **EVERYTHING), progress=progress)
    whole = {
        index for index in range(2) if not any(f".{index}." in m["name"] and m["rank"] for m in report["matrices"])
    }
    assert bool(whole) == (ratio == 0.05)
    assert {"sampling text", "measuring spectra", "compressing"} == set(shares)
    assert shares == pytest.approx(dict.fromkeys(shares, 1.0))
