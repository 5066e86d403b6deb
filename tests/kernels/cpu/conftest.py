"""A fixture that runs a test on each instruction set of the CPU core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from neuronmm.kernels.cpu.library import core, set_isa


@pytest.fixture(params=["avx512bf16", "avx512bf16+fp32", "avx512", "avx2", "portable"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Select an instruction set for the test; skip it without the core or the instructions."""
    if core() is None or not set_isa(request.param):
        pytest.skip(f"{request.param} cannot run here")
    yield request.param
    set_isa(None)
