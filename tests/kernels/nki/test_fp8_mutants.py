"""Planted bugs in what the kernels do with scales: each is caught by a few small cases in fp8."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from error_rule import assert_twice_plain
from neuronmm.emulator.nki import NkiError
from nki_mutants import Mutant, planted

SCALING = [
    Mutant("the scales of the chunk before", "scaling", "k = f.at + column + c", "k = f.at + max(0, column + c - 1)"),
    Mutant("every factor has the first scales", "scaling", "k = f.at + column + c", "k = column + c"),
    Mutant("the scale is not read before SiLU", "scaling", "d.scale_silu(dst, src, scale)", "d.silu(dst, src)"),
    Mutant(
        "a block's sum is not added",
        "scaling",
        "d.scale_add(dst, src, scale, other[0:wide, at + c, t0 : t0 + t])",
        "d.scale(dst, src, scale)",
    ),
    Mutant(
        "up ignores the gate",
        "scaling",
        "d.scale_multiply(dst, src, scale, other[0:wide, at + c, t0 : t0 + t])",
        "d.scale(dst, src, scale)",
    ),
    Mutant(
        "the norm of the first tokens for all",
        "scaling",
        "d.scale_multiply(dst, src, scale, other[0:wide, t0 : t0 + t])",
        "d.scale_multiply(dst, src, scale, other[0:wide, 0:t])",
    ),
    Mutant("the bias of the first chunk", "scaling", "wide, column + c : column + c + 1]", "wide, 0:1]"),
    Mutant("the bias is the scales", "scaling", "count, f.at + f.columns.count", "count, f.at"),
    Mutant("odd copies are not scaled", "scaling", "d.scale_scalar(dst, src, column)", "d.copy_scalar(dst, src)"),
    Mutant("even copies are not scaled", "scaling", "d.scale(dst, src, column)", "d.copy(dst, src)"),
    Mutant("the norm's weight is that of the first chunks", "scaling", "first + c : first + c + 1]", "c : c + 1]"),
    Mutant("the norm's weight is not applied", "stages", "if factors[0].scaled:", "if factors[0].at < 0:"),
    Mutant("nothing is scaled", "matmuls", "if f.scaled:", "if f.scaled and first < 0:"),
    Mutant("the norm has no columns in the table", "table", "if norm else 0", "if norm and shared else 0"),
    Mutant("up's A has columns in the table", "table", "0 if shared and i == 2", "0 if shared and i == 9"),
]  # fmt: skip


def battery(kernels: Any, make: Any) -> None:
    """A few small cases with every way in which a result leaves PSUM."""
    small = kernels.problem.Blocks(tokens=40, moving=24, depth=1, intermediate=2, panels=2)
    whole = kernels.problem.Blocks(tokens=45, moving=24)
    for dialect in ("neuronxcc", "nki"):
        for case in (
            make.linear(300, 150, 700, 70, torch.bfloat16, norm=True, bias=True, fp8=True),
            make.linear(200, 300, 700, 45, torch.bfloat16, pivots=130, residual=True, fp8=True),
            make.linear(571, 270, 300, 45, torch.bfloat16, pivots="columns", fp8=True),
            make.mlp(140, 700, (200, 200, 150), 45, torch.bfloat16, norm=True, shared=True, fp8=True),
            make.mlp(140, 900, (330, 200, 410), 30, torch.bfloat16, pivots=(300, 450, "columns"), fp8=True),
        ):
            run_case(kernels, case, dialect, small)
            run_case(kernels, case, dialect, whole)


def run_case(kernels: Any, case: Any, dialect: str, sizes: Any) -> None:
    """Apply the error rule to one case whose arguments are planned by the modules under test."""
    result = case.run(kernels, dialect, sizes)
    assert_twice_plain([case], lambda _, y=result: y, lambda c: c.plain(), lambda c: c.exact())


def test_the_battery_passes_on_the_correct_kernels(make: Any) -> None:
    with planted(None) as copy:
        battery(copy, make)


@pytest.mark.parametrize("mutant", SCALING, ids=lambda m: m.what.replace(" ", "-"))
def test_the_mutant_is_caught(make: Any, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted(mutant) as kernels, pytest.raises((NkiError, AssertionError, ValueError)):
        monkeypatch.setattr("nki_cases.starts", kernels.table.starts)
        battery(kernels, make)
