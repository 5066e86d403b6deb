"""Every planted bug is caught, by a rule of the emulator or by wrong numbers."""

from __future__ import annotations

from typing import Any

import pytest

from neuronmm.emulator.nki import NkiError
from nki_mutants import MUTANTS, Mutant, battery, planted
from nki_mutants_cutting import CUTTING
from nki_mutants_pivots import PIVOTS


def test_the_battery_passes_on_the_correct_kernels(kernels: Any, make: Any) -> None:
    battery(kernels, make)
    with planted(None) as copy:
        battery(copy, make)


@pytest.mark.parametrize("mutant", [*MUTANTS, *CUTTING, *PIVOTS], ids=lambda m: m.what.replace(" ", "-"))
def test_the_mutant_is_caught(make: Any, mutant: Mutant) -> None:
    with planted(mutant) as kernels, pytest.raises((NkiError, AssertionError, ValueError)):
        battery(kernels, make)
