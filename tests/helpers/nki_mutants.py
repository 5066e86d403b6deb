"""Planted bugs: one-line changes of the kernels, and the battery of small cases that must catch each of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from error_rule import assert_twice_plain
from neuronmm.emulator.nki import TensorSpec, nki_modules, run
from neuronmm.kernels import nki as package

FOLDER = Path(package.__file__).parent
FILES = (
    "problem", "objects", "layout", "table", "forms", "strip", "tiling", "choice", "moves", "scaling", "matmuls",
    "stages", "low_rank_matmul", "low_rank_mlp", "baselines", "dialect_neuronxcc", "dialect_nki", "jitted",
    "entry_neuronxcc", "entry_nki",
)  # fmt: skip
"""The modules that may have a bug, each after those it imports."""


class Mutant(NamedTuple):
    """Replace the first ``old`` in ``file`` by ``new``; ``what`` describes the bug."""

    what: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "the last chunk of a contraction is dropped",
        "matmuls",
        "range(last - first):\n        deep",
        "range(last - first - 1):\n        deep",
    ),
    Mutant("a matmul reads the ragged row of a short chunk", "matmuls", "f.rows.length(first + c)", "f.rows.width"),
    Mutant(
        "a matmul misses the last partition",
        "matmuls",
        "deep = f.rows.length(first + c)",
        "deep = f.rows.length(first + c) - 1",
    ),
    Mutant(
        "weights are read one column too far",
        "matmuls",
        "at = c * panel.columns + column",
        "at = c * panel.columns + column + 1",
    ),
    Mutant(
        "the result is in SBUF",
        "matmuls",
        "acc = d.psum((cut.width, n, t))",
        "acc = d.sbuf((cut.width, n, t), d.float32)",
    ),
    Mutant("the result takes more than one bank", "matmuls", "max(1, BANK // tokens)", "max(1, 2 * BANK // tokens)"),
    Mutant("one matmul for all tokens of a strip", "matmuls", "split(d, tokens, moving):", "split(d, tokens, 0):"),
    Mutant(
        "blocks are summed in bfloat16",
        "stages",
        "to.sums.append(d.sbuf(shape, d.float32))",
        "to.sums.append(d.sbuf(shape, dtype))",
    ),
    Mutant("a block overwrites the sum", "stages", "if begins else ADD\n", "if begins else COPY\n"),
    Mutant("the second block starts a new sum", "stages", "begins = first == 0\n", "begins = first <= 1\n"),
    Mutant(
        "the last chunk of the output is not stored",
        "stages",
        "store_rows(d, y, out, cut, first, last, start, tokens,",
        "store_rows(d, y, out, cut, first, last - 1, start, tokens,",
    ),
    Mutant(
        "the last token is not stored",
        "stages",
        "store_rows(d, y, out, cut, first, last, start, tokens,",
        "store_rows(d, y, out, cut, first, last, start, tokens - 1,",
    ),
    Mutant(
        "the output is stored one token late",
        "stages",
        "store_rows(d, y, out, cut, first, last, start, tokens,",
        "store_rows(d, y, out, cut, first, last, start + 1, tokens,",
    ),
    Mutant("the ragged row is not moved", "moves", ", (s.width - 1, s.width, first, middle)]", "]"),
    Mutant(
        "the ragged row is moved for every chunk",
        "moves",
        "(s.width - 1, s.width, first, middle)]",
        "(s.width - 1, s.width, first, last)]",
    ),
    Mutant("every block reads the first block's weights", "moves", "c0 - piece.first) * wide", "0) * wide"),
    Mutant(
        "weights are loaded without their last partition",
        "moves",
        "d.run(f.weights, offset, piece.end - piece.begin,",
        "d.run(f.weights, offset, piece.end - piece.begin - 1,",
    ),
    Mutant(
        "a weight tile sixty-four times too large",
        "moves",
        "tile = d.sbuf((cut.width, (last",
        "tile = d.sbuf((cut.width, 64 * (last",
    ),
    Mutant(
        "every token block is written to the first",
        "matmuls",
        "dst = d.at(out, ((0, wide), (at, at + chunks), (t0, t0 + t)))",
        "dst = d.at(out, ((0, wide), (at, at + chunks), (0, t)))",
    ),
    Mutant(
        "evictions start at partition 1",
        "matmuls",
        "dst = d.at(out, ((0, wide), (at, at + chunks), (t0, t0 + t)))",
        "dst = d.at(out, ((1, wide), (at, at + chunks), (t0, t0 + t)))",
    ),
    Mutant("the residual is not added", "stages", "kind, other = ADD, extra", "kind, other = COPY, extra"),
    Mutant(
        "all tokens get the residual of the first tokens",
        "matmuls",
        "d.add(dst, src, other[0:wide, at : at + chunks, t0 : t0 + t])",
        "d.add(dst, src, other[0:wide, at : at + chunks, 0:t])",
    ),
    Mutant("the mean square counts the padding", "stages", "1.0 / cut.size", "1.0 / (cut.count * cut.width)"),
    Mutant("the norm has no epsilon", "stages", "d.fill(bias, epsilon)", "d.fill(bias, 0.0)"),
    Mutant("the ones are never written", "stages", "    d.fill(ones, 1.0)\n", ""),
    Mutant(
        "the squares of a block overwrite the sum",
        "stages",
        "        if first == 0:\n            d.copy(dst, acc)",
        "        if first >= 0:\n            d.copy(dst, acc)",
    ),
    Mutant("the sum of the blocks is not scaled", "stages", "ends and (begins or not scaled)", "ends"),
    Mutant(
        "all tokens get the scale of the first tokens", "matmuls", "other[0:wide, t0 : t0 + t])", "other[0:wide, 0:t])"
    ),
    Mutant(
        "all panels of a tile read the weights of the first", "matmuls", "            at += rows * panel.columns\n", ""
    ),
    Mutant(
        "all panels of a tile of A read the weights of the first",
        "stages",
        "            at += (last - first) * panel.columns\n",
        "",
    ),
    Mutant(
        "panels of a tile are one element too far apart",
        "moves",
        "        at += (last - first) * wide\n",
        "        at += (last - first) * wide + 1\n",
    ),
    Mutant(
        "all groups of chunks get the bias of the first group", "matmuls", "column + c : column + c + 1", "c : c + 1"
    ),
    Mutant(
        "only the first chunk of the bias is widened",
        "moves",
        "(c, c + n))), raw[0:wide, c : c + n])",
        "(c, c + 1))), raw[0:wide, c : c + 1])",
    ),
    Mutant("the residual is lost if there is a bias", "stages", "if options.adds and options.biased:", "if 0:"),
    Mutant(
        "tokens first: every block loads the first tokens",
        "moves",
        "d.columns(x, start + t0, t, s.start",
        "d.columns(x, start, t, s.start",
    ),
    Mutant("tokens first: nothing is transposed", "moves", "d.transpose((n, t), row[0:t, 0:n, i])", "row[0:t, 0:n, i]"),
    Mutant(
        "tokens first: the step between features is one short",
        "moves",
        "p1 - p0, s.count, c1)\n                    d.load",
        "p1 - p0, s.count - 1, c1)\n                    d.load",
    ),
    Mutant("tokens first: the ragged row is not stored", "moves", "(s.width - 1, s.width, s.full)]", "(0, 0, 0)]"),
    Mutant(
        "one token: all chunks are written to the first",
        "moves",
        "d.at(acc, ((0, n), c - c0, (0, 1)))",
        "d.at(acc, ((0, n), 0, (0, 1)))",
    ),
    Mutant(
        "one token: the ragged row is not moved",
        "moves",
        "in _runs(s):\n            p0, p1, c1 = run\n            first",
        "in _runs(s)[:1]:\n            p0, p1, c1 = run\n            first",
    ),
    Mutant("one token: every chunk is the first", "moves", "row[0:1, 0:n, c - s.first], one", "row[0:1, 0:n, 0], one"),
    Mutant("one token: the input is doubled", "moves", "d.fill(one, 1.0)", "d.fill(one, 2.0)"),
    Mutant("every chunk of a panel is its first one", "stages", "slots.append(slot)", "slots.append(0)"),
    Mutant("the last strip is dropped", "low_rank_matmul", "    if tail > 0:", "    if tail > 1000:"),
    Mutant("the last strip reads the first tokens", "low_rank_matmul", "strips * blocks.tokens, tail", "0, tail"),
    Mutant("strips overlap", "low_rank_matmul", "y, i * blocks.tokens,", "y, i * (blocks.tokens - 1),"),
    Mutant("no SiLU", "matmuls", "d.silu(dst, src)", "d.copy(dst, src)"),
    Mutant(
        "the gate is ignored",
        "matmuls",
        "d.multiply(dst, src, other[0:wide, at : at + chunks, t0 : t0 + t])",
        "d.copy(dst, src)",
    ),
    Mutant("a panel of each block is skipped", "objects", "if first <= panel.first", "if first < panel.first"),
    Mutant("up uses gate's input", "low_rank_mlp", "return both[0], both[1]", "return both[0], both[0]"),
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
        "neuronxcc: rows are read one feature too far",
        "dialect_neuronxcc",
        "x[first + p * stride + c, start + t]",
        "x[first + p * stride + c + 1, start + t]",
    ),
    Mutant("neuronxcc: the only token is read one feature too far", "dialect_neuronxcc", "c, t]", "c + 1, t]"),
    Mutant(
        "nki: the only token is read one feature too far",
        "dialect_nki",
        "[1, chunks]], offset=first)",
        "[1, chunks]], offset=first + 1)",
    ),
    Mutant(
        "nki: matmuls overwrite",
        "dialect_nki",
        "nisa.nc_matmul(dst, stationary, moving)",
        "nisa.nc_matmul(dst, stationary, moving, accumulate=False)",
    ),
    Mutant(
        "nki: matmuls accumulate on unwritten memory",
        "dialect_nki",
        "nisa.nc_matmul(dst, stationary, moving)",
        "nisa.nc_matmul(dst, stationary, moving, accumulate=True)",
    ),
    Mutant(
        "nki: the operands are swapped",
        "dialect_nki",
        "nisa.nc_matmul(dst, stationary, moving)",
        "nisa.nc_matmul(dst, moving, stationary)",
    ),
    Mutant(
        "nki: a memset clears the accumulators",
        "dialect_nki",
        "    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)",
        "    t = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)\n        nisa.memset(t, 0.0)\n        return t",
    ),
    Mutant(
        "nki: the step between rows is too short",
        "dialect_nki",
        "[[stride * width, partitions]",
        "[[stride * width - 1, partitions]",
    ),
    Mutant(
        "neuronxcc: loops over Python's lists are not unrolled",
        "dialect_neuronxcc",
        "return nl.static_range(count)",
        "return nl.sequential_range(count)",
    ),
    Mutant(
        "neuronxcc: transpositions leave in the source's dtype",
        "dialect_neuronxcc",
        "nl.float32 if is_v2 else src.dtype",
        "src.dtype",
    ),
    Mutant(
        "nki: transpositions leave in float32",
        "dialect_nki",
        "transposed = nl.ndarray(shape, dtype=src.dtype",
        "transposed = nl.ndarray(shape, dtype=nl.float32",
    ),
]


FEW = (300, 200), (350, 130), ("columns", 300)
"""Pivots of an MLP with larger ranks."""


@contextmanager
def planted(mutant: Mutant | None) -> Iterator[Any]:
    """Yield copies of the kernel modules with the mutant in them; the real modules stay unchanged."""
    parent = ModuleType("mutant_nki")
    modules, names = SimpleNamespace(), [parent.__name__]
    sys.modules[parent.__name__] = parent
    try:
        with nki_modules():
            for name in FILES:
                path = FOLDER / f"{name}.py"
                text = path.read_text(encoding="utf-8")
                if mutant is not None and mutant.file == name:
                    assert mutant.old in text, f"{name}.py has no {mutant.old!r}: update the mutant"
                    text = text.replace(mutant.old, mutant.new, 1)
                module = ModuleType(f"mutant_nki.{name}")
                module.__file__ = str(path)
                names.append(module.__name__)
                sys.modules[module.__name__] = module
                exec(compile(text.replace("neuronmm.kernels.nki", "mutant_nki"), str(path), "exec"), module.__dict__)
                setattr(modules, name, module)
                setattr(parent, name, module)
        yield modules
    finally:
        for name in names:
            del sys.modules[name]


def battery(kernels: Any, make: Any) -> None:
    """What the kernels are held to, on a few small shapes that have every kind of tail."""
    small = kernels.problem.Blocks(tokens=40, moving=24, depth=1, intermediate=2, panels=2)
    parts = kernels.problem.Blocks(tokens=30, moving=30, depth=1)
    long, single = kernels.problem.Blocks(tokens=520), kernels.problem.Blocks(tokens=1, moving=1)
    wide = kernels.problem.Blocks(tokens=520, panels=2)
    for dialect in ("neuronxcc", "nki"):
        for case, sizes in (
            (make.linear(300, 150, 270, 70, torch.float32, norm=True, residual=True), small),
            (make.linear(300, 150, 270, 90, torch.float32), small),
            (make.linear(260, 1101, 701, 30, torch.float32, norm=True, residual=True), parts),
            (make.linear(140, 300, 130, 30, torch.float32, norm=True), None),
            (make.linear(300, 150, 700, 70, torch.float32, bias=True, residual=True), small),
            (make.linear(301, 150, 271, 150, torch.float32, tokens_first=True), None),
            (make.linear(301, 150, 271, 90, torch.float32, tokens_first=True), small),
            (make.linear(130, 520, 700, 520, torch.float32, tokens_first=True), long),
            (make.linear(130, 520, 700, 520, torch.float32, bias=True, residual=True), long),
            (make.linear(130, 20, 700, 100, torch.float32), None),
            (make.linear(257, 40, 300, 3, torch.float32, norm=True), None),
            (make.linear(130, 1100, 1300, 6, torch.float32), kernels.problem.Blocks(tokens=6, moving=6, panels=2)),
            (make.linear(140, 40, 30, 50, torch.float32, norm=True), kernels.problem.Blocks(tokens=50, moving=24)),
            (make.linear(130, 20, 140, 600, torch.float32), kernels.problem.Blocks(tokens=600)),
            (make.linear(257, 40, 300, 1, torch.float32, residual=True), None),
            (make.linear(257, 40, 300, 1, torch.float32, tokens_first=True), None),
            (make.mlp(140, 700, (100, 60, 80), 50, torch.float32), small),
            (make.mlp(140, 700, (100, 520, 80), 90, torch.float32), small),
            (make.linear(200, 300, 700, 70, torch.float32, pivots=130, bias=True, residual=True), small),
            (make.linear(200, 1300, 1700, 520, torch.float32, pivots=129, residual=True), wide),
            (make.linear(571, 270, 300, 70, torch.float32, pivots="columns"), small),
            (make.linear(571, 270, 300, 1, torch.float32, pivots="columns"), single),
            (make.linear(571, 270, 300, 1, torch.float32, pivots="columns"), None),
            (make.linear(571, 270, 300, 150, torch.float32, pivots="columns", tokens_first=True), None),
            (make.linear(200, 130, 300, 150, torch.float32, pivots=70, tokens_first=True), None),
            (make.mlp(140, 900, (330, 200, 410), 50, torch.float32, pivots=(300, 450, "columns")), small),
            (make.mlp(140, 900, (330, 400, 810), 50, torch.float32, pivots=FEW), small),
        ):
            assert_near(case.run(kernels, dialect, sizes), case.exact())
    for layout in ("HSB", "BSH"):
        assert_entries(kernels.entry_neuronxcc, make, layout)
    even = make.linear(8192, 64, 64, 8, torch.bfloat16, norm=True)
    even.x = even.x.sign() * 1.18  # each block adds the same to the sum of squares, and bfloat16 rounds that up
    for case, sizes in (
        (even, kernels.problem.Blocks(tokens=8, moving=8, depth=1)),
        (make.linear(65_700, 8, 64, 1, torch.bfloat16), single),
        (make.linear(8192, 64, 64, 8, torch.bfloat16), kernels.problem.Blocks(tokens=8, moving=8, depth=1)),
        (make.linear(576, 300, 576, 30, torch.bfloat16), None),
    ):
        result = case.run(kernels, "nki", sizes)
        assert_twice_plain([case], lambda _, y=result: y, lambda c: c.plain(), lambda c: c.exact())
    for dialect in ("neuronxcc", "nki"):
        case = make.linear(140, 30, 130, 140, torch.bfloat16, tokens_first=True)
        result = case.run(kernels, dialect)
        assert_twice_plain([case], lambda _, y=result: y, lambda c: c.plain(), lambda c: c.exact())


def assert_entries(entry: Any, make: Any, layout: str) -> None:
    """Assert, in one layout, the kernels that only hosts use: one weight over several strips, and the partial MLP.

    The linear with pivots takes the packing of the entries.
    """
    tokens_first = layout == "BSH"
    case = make.linear(130, 70, 1, 1100, torch.float32, tokens_first=tokens_first)
    shape = (1100, 70) if tokens_first else (70, 1100)
    y = case.result(run(entry.packed_matmul(layout), *case.arguments()[:2], outputs=[TensorSpec(shape)]).outputs[0])
    assert_near(y, case.weights[0].double() @ case.x.double())
    case = make.linear(130, 260, 700, 30, torch.float32, tokens_first=tokens_first, pivots=140)
    kernel = entry.low_rank_matmul(260, layout=layout, form=case.form[0], pivots=140)
    assert_near(case.result(run(kernel, *case.arguments(), outputs=[case.output()]).outputs[0]), case.exact())
    for middle, ranks, pivots in (
        (300, (130, 130, 1101), (None, None, None)),
        (900, (330, 200, 410), (300, 450, "columns")),
        (900, (330, 400, 810), FEW),
    ):
        case = make.mlp(200, middle, ranks, 70, torch.float32, tokens_first=tokens_first, pivots=pivots)
        kernel = entry.low_rank_swiglu_mlp(case.ranks(), layout=layout, partial=True)
        shape = (70, ranks[2]) if tokens_first else (ranks[2], 70)
        part = case.result(run(kernel, *case.arguments()[:-1], outputs=[TensorSpec(shape)]).outputs[0])
        assert_near(case.weights[5].double() @ part.double(), case.exact())


def assert_near(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert a relative error of at most 1e-5 against float64."""
    error = (actual.double() - exact).norm() / exact.norm()
    assert error <= 1e-5
