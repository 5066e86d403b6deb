"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Every test draws the same random numbers whatever ran before it, and leaves none of its own behind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
