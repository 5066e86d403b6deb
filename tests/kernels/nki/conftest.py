"""Fixtures: the kernel modules and the random calls that they run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nki_cases import Case, kernel_modules, to_numpy, to_torch


@pytest.fixture(scope="session")
def kernels() -> SimpleNamespace:
    """The kernel modules of the project."""
    return kernel_modules()


@pytest.fixture(scope="session")
def make() -> type[Case]:
    """The constructors of random calls: ``make.linear(...)`` and ``make.mlp(...)``."""
    return Case


@pytest.fixture(scope="session")
def arrays() -> SimpleNamespace:
    """Conversions between torch and the emulator's arrays."""
    return SimpleNamespace(to_numpy=to_numpy, to_torch=to_torch)
