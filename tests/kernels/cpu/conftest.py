"""The CPU core's instruction sets and thread counts, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from neuronmm.kernels.cpu.library import core, set_isa


@pytest.fixture(params=["avx512bf16+amx", "avx512bf16", "avx512bf16+fp32", "avx512", "avx2", "portable"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the one that is in use during the test; without the core, or the instructions, there is none."""
    if core() is None or not set_isa(request.param):
        pytest.skip(f"{request.param} cannot run here")
    yield request.param
    set_isa(None)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of threads during the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
