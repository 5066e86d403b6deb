"""Planted bugs: each one-line change of a kernel must be caught, by a rule of the emulator or by the numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from neuronmm.emulator.nki import NkiError, nki_modules
from neuronmm.kernels import nki as package
from rule import assert_twice_plain

FOLDER = Path(package.__file__).parent
FILES = ("blocks", "stages", "low_rank_matmul", "low_rank_mlp", "dialect_neuronxcc", "dialect_nki")


class Mutant(NamedTuple):
    """In ``file``, the first ``old`` becomes ``new``."""

    what: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "the last chunk of a contraction is dropped",
        "stages",
        "range(last - first):\n        deep",
        "range(last - first - 1):\n        deep",
    ),
    Mutant("a product reads the ragged row of a short chunk", "stages", "how.rows.length(first + c)", "how.rows.width"),
    Mutant(
        "a product misses the last partition",
        "stages",
        "deep = how.rows.length(first + c)",
        "deep = how.rows.length(first + c) - 1",
    ),
    Mutant(
        "weights are read one column on",
        "stages",
        "at = c * panel.columns + column",
        "at = c * panel.columns + column + 1",
    ),
    Mutant(
        "the result lies in SBUF",
        "stages",
        "acc = d.psum((how.columns.width, n, t))",
        "acc = d.sbuf((how.columns.width, n, t), d.float32)",
    ),
    Mutant("the result takes more than a bank", "stages", "max(1, BANK // tokens)", "max(1, 2 * BANK // tokens)"),
    Mutant(
        "products of a whole strip at once",
        "stages",
        "for t0, t in split(tokens, moving):",
        "for t0, t in split(tokens, 0):",
    ),
    Mutant(
        "blocks are summed in bfloat16",
        "stages",
        "to.sums.append(d.sbuf(shape, d.float32))",
        "to.sums.append(d.sbuf(shape, dtype))",
    ),
    Mutant(
        "a block overwrites the sum",
        "stages",
        "d.add(d.at(target, *place), src, to.sums[p][0:wide, at : at + m, t0 : t0 + t])",
        "evict(d, d.at(target, *place), src, turn)",
    ),
    Mutant("the second block begins anew", "stages", "begins, ends = first == 0,", "begins, ends = first <= 1,"),
    Mutant(
        "the last chunk of the output is not stored",
        "stages",
        "store_rows(d, y, out, cut, first, last, start, tokens)",
        "store_rows(d, y, out, cut, first, last - 1, start, tokens)",
    ),
    Mutant(
        "the last token is not stored",
        "stages",
        "store_rows(d, y, out, cut, first, last, start, tokens)",
        "store_rows(d, y, out, cut, first, last, start, tokens - 1)",
    ),
    Mutant(
        "the output is stored one token late",
        "stages",
        "store_rows(d, y, out, cut, first, last, start, tokens)",
        "store_rows(d, y, out, cut, first, last, start + 1, tokens)",
    ),
    Mutant("the ragged row is not moved", "stages", ", (cut.width - 1, cut.width, first, middle)]", "]"),
    Mutant(
        "the ragged row is moved for every chunk",
        "stages",
        "(cut.width - 1, cut.width, first, middle)]",
        "(cut.width - 1, cut.width, first, last)]",
    ),
    Mutant("every block reads the first block's weights", "stages", "panel.offset + first * wide", "panel.offset"),
    Mutant(
        "weights are loaded without their last partition",
        "stages",
        "d.run(f.weights, panel.offset + first * wide, cut.width,",
        "d.run(f.weights, panel.offset + first * wide, cut.width - 1,",
    ),
    Mutant(
        "a weight tile eight times too large",
        "stages",
        "tile = d.sbuf((cut.width, length)",
        "tile = d.sbuf((cut.width, 64 * length)",
    ),
    Mutant(
        "every token block is written to the first",
        "stages",
        "place = ((0, wide), (at, at + m), (t0, t0 + t))",
        "place = ((0, wide), (at, at + m), (0, t))",
    ),
    Mutant(
        "evictions start at partition 1",
        "stages",
        "                        dst = d.at(out, (0, wide), (at, at + m), (t0, t0 + t))",
        "                        dst = d.at(out, (1, wide), (at, at + m), (t0, t0 + t))",
    ),
    Mutant(
        "the residual is not added", "stages", "                        if adds:\n", "                        if 0:\n"
    ),
    Mutant(
        "the residual of the first tokens for all",
        "stages",
        "extra[0:wide, at : at + m, t0 : t0 + t]",
        "extra[0:wide, at : at + m, 0:t]",
    ),
    Mutant("the mean square counts the padding", "stages", "1.0 / cut.size", "1.0 / (cut.count * cut.width)"),
    Mutant("the norm has no epsilon", "stages", "d.fill(bias, epsilon)", "d.fill(bias, 0.0)"),
    Mutant("the ones are never written", "stages", "    d.fill(ones, 1.0)\n", ""),
    Mutant(
        "the squares of a block overwrite",
        "stages",
        "        if first == 0:\n            d.copy(dst, acc)",
        "        if first >= 0:\n            d.copy(dst, acc)",
    ),
    Mutant("the sum of the blocks is not scaled", "stages", "if ends and scaled:", "if ends and scaled and first < 0:"),
    Mutant("the scale of the first tokens for all", "stages", "scale[0:wide, t0 : t0 + t])", "scale[0:wide, 0:t])"),
    Mutant("the last strip is dropped", "low_rank_matmul", "    if rest:", "    if rest > 1000:"),
    Mutant("the last strip reads the first tokens", "low_rank_matmul", "strips * blocks.tokens, rest", "0, rest"),
    Mutant("strips overlap", "low_rank_matmul", "y, i * blocks.tokens,", "y, i * (blocks.tokens - 1),"),
    Mutant("no SiLU", "low_rank_mlp", "d.silu(dst, src)", "d.copy(dst, src)"),
    Mutant(
        "gate is lost",
        "low_rank_mlp",
        "d.multiply(dst, src, act[0:wide, at : at + m, t0 : t0 + t])",
        "d.copy(dst, src)",
    ),
    Mutant(
        "a panel of each block is skipped", "low_rank_mlp", "if panel.first < first or", "if panel.first <= first or"
    ),
    Mutant("up uses gate's input", "low_rank_mlp", "return made[0], made[-1]", "return made[0], made[0]"),
    Mutant("neuronxcc: products overwrite", "dialect_neuronxcc", "tile[key] += nisa", "tile[key] = nisa"),
    Mutant(
        "neuronxcc: accumulation begins on unwritten memory",
        "dialect_neuronxcc",
        "nl.zeros((nl.par_dim(shape[0]), *shape[1:]), dtype=nl.float32",
        "nl.ndarray((nl.par_dim(shape[0]), *shape[1:]), dtype=nl.float32",
    ),
    Mutant(
        "neuronxcc: accumulation in bfloat16",
        "dialect_neuronxcc",
        "dtype=nl.float32, buffer=nl.psum",
        "dtype=nl.bfloat16, buffer=nl.psum",
    ),
    Mutant(
        "neuronxcc: rows are read one on",
        "dialect_neuronxcc",
        "x[first + p * stride + c, start + t]",
        "x[first + p * stride + c + 1, start + t]",
    ),
    Mutant(
        "nki: products overwrite",
        "dialect_nki",
        "nisa.nc_matmul(dst, stationary, moving)",
        "nisa.nc_matmul(dst, stationary, moving, accumulate=False)",
    ),
    Mutant(
        "nki: products accumulate on unwritten memory",
        "dialect_nki",
        "nisa.nc_matmul(dst, stationary, moving)",
        "nisa.nc_matmul(dst, stationary, moving, accumulate=True)",
    ),
    Mutant(
        "nki: operands change places",
        "dialect_nki",
        "nisa.nc_matmul(dst, stationary, moving)",
        "nisa.nc_matmul(dst, moving, stationary)",
    ),
    Mutant(
        "nki: accumulators are cleared first",
        "dialect_nki",
        "    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)",
        "    t = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)\n    nisa.memset(t, 0.0)\n    return t",
    ),
    Mutant(
        "nki: the rows' step is short",
        "dialect_nki",
        "[[stride * width, partitions]",
        "[[stride * width - 1, partitions]",
    ),
]


@contextmanager
def planted(mutant: Mutant | None) -> Iterator[Any]:
    """The kernel modules with a mutant in them, apart from the real ones."""
    space, names = SimpleNamespace(), []
    try:
        with nki_modules():
            for name in FILES:
                path = FOLDER / f"{name}.py"
                text = path.read_text(encoding="utf-8")
                if mutant is not None and mutant.file == name:
                    assert mutant.old in text, "the mutant has nothing to change: the kernels have moved on"
                    text = text.replace(mutant.old, mutant.new, 1)
                module = ModuleType(f"mutant_nki.{name}")
                names.append(module.__name__)
                sys.modules[module.__name__] = module
                exec(compile(text.replace("neuronmm.kernels.nki", "mutant_nki"), str(path), "exec"), module.__dict__)
                setattr(space, name, module)
        yield space
    finally:
        for name in names:
            del sys.modules[name]


def battery(kernels: Any, make: Any) -> None:
    """What the kernels are held to, on a few small shapes that have every kind of tail."""
    small = kernels.blocks.Blocks(tokens=40, moving=24, depth=1, intermediate=2)
    for dialect in ("neuronxcc", "nki"):
        for case, sizes in (
            (make.linear(300, 150, 270, 70, torch.float32, norm=True, residual=True), small),
            (make.linear(300, 150, 270, 90, torch.float32), small),
            (make.linear(130, 20, 700, 100, torch.float32), None),
            (make.linear(257, 40, 300, 3, torch.float32, norm=True), None),
            (make.linear(130, 20, 140, 600, torch.float32), kernels.blocks.Blocks(tokens=600)),
            (make.mlp(140, 700, (100, 60, 80), 50, torch.float32), small),
        ):
            error = (case.run(kernels, dialect, sizes).double() - case.exact()).norm() / case.exact().norm()
            assert error <= 1e-5
    for case, sizes in (
        (make.linear(8192, 64, 64, 8, torch.bfloat16), kernels.blocks.Blocks(tokens=8, moving=8, depth=1)),
        (make.linear(576, 300, 576, 30, torch.bfloat16), None),
    ):
        made = case.run(kernels, "nki", sizes)
        assert_twice_plain([case], lambda _, y=made: y, lambda c: c.plain(), lambda c: c.exact())


def test_the_battery_passes_on_the_kernels(kernels: Any, make: Any) -> None:
    battery(kernels, make)
    with planted(None) as copy:
        battery(copy, make)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.what.replace(" ", "-"))
def test_the_mutant_is_caught(make: Any, mutant: Mutant) -> None:
    with planted(mutant) as kernels, pytest.raises((NkiError, AssertionError, ValueError)):
        battery(kernels, make)
