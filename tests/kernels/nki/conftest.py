"""The kernel modules, and the cases they are run on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from nki_cases import Case, to_numpy, to_torch

from neuronmm.emulator.nki import nki_modules
from neuronmm.kernels.nki import baselines, blocks, low_rank_matmul, low_rank_mlp, moves, stages

with nki_modules():
    from neuronmm.kernels.nki import dialect_neuronxcc, dialect_nki, entry_neuronxcc, entry_nki


@pytest.fixture(scope="session")
def kernels() -> SimpleNamespace:
    """The kernel modules of the project."""
    return SimpleNamespace(
        baselines=baselines,
        blocks=blocks,
        moves=moves,
        stages=stages,
        low_rank_matmul=low_rank_matmul,
        low_rank_mlp=low_rank_mlp,
        dialect_neuronxcc=dialect_neuronxcc,
        dialect_nki=dialect_nki,
        entry_neuronxcc=entry_neuronxcc,
        entry_nki=entry_nki,
    )


@pytest.fixture(scope="session")
def make() -> type[Case]:
    """The maker of cases: ``make.linear(...)`` and ``make.mlp(...)``."""
    return Case


@pytest.fixture(scope="session")
def arrays() -> SimpleNamespace:
    """Conversions between torch and the emulator's arrays."""
    return SimpleNamespace(to_numpy=to_numpy, to_torch=to_torch)
