"""The kernels use only the language of their compilers, and the solver runs outside the compiled kernels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuronmm.emulator.nki import NkiError, TensorSpec, run
from neuronmm.emulator.nki.contract import check_values
from neuronmm.kernels import nki as kernels_package
from neuronmm.kernels.nki import tiling
from neuronmm.kernels.nki.problem import Ranks
from nki_subset import problems

FOLDER = Path(kernels_package.__file__).parent
BODIES = ("objects", "moves", "scaling", "matmuls", "stages", "low_rank_matmul", "low_rank_mlp", "baselines")
COMPILED = (*BODIES, "dialect_nki", "jitted")
MODULES = {f"neuronmm.kernels.nki.{name}" for name in COMPILED}


def text(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_keep_to_the_subset(name: str) -> None:
    assert list(problems(text(name), MODULES)) == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("from neuronmm.kernels.nki.tiling import solve", "imports neuronmm.kernels.nki.tiling"),
        ("import hashlib", "imports hashlib"),
        ("from pathlib import Path", "imports pathlib"),
        ("class A:\n    x: int", "must inherit from NKIObject"),
        ("class A(NKIObject, B):\n    x: int", "must inherit from NKIObject"),
        ("@dataclass(frozen=True)\nclass A(NKIObject):\n    x: int", "decorator dataclass(frozen=True)"),
        ("class A(NKIObject):\n    @property\n    def x(self): return 1", "decorator property"),
        ("class A(NKIObject):\n    @classmethod\n    def x(cls): return 1", "decorator classmethod"),
        ("def f(a, *, b): return a", "keyword-only"),
        ("def f(*a): return a", "variable parameters"),
        ("def f(a):\n    return a is None", "Is in f"),
        ("def f(a):\n    return a in (1, 2)", "In in f"),
        ("def f(a):\n    return [b for b in a]", "ListComp in f"),
        ("def f(a):\n    return lambda b: a", "Lambda in f"),
        ("def f(a):\n    def g(): return a\n    return g", "FunctionDef in f"),
        ("def f(a):\n    return g(*a)", "Starred in f"),
        ("def f(a):\n    with open(a): return 1", "With in f"),
        ("def f(a):\n    try:\n        return a\n    except KeyError:\n        return 1", "Try in f"),
        ("def f(a):\n    yield a", "Yield in f"),
        ("def f(a):\n    return sum(a)", "f calls sum"),
        ("def f(a):\n    for b, c in zip(a, a):\n        b.x(c)", "f calls zip"),
        ("def f(a):\n    for b, c in a:\n        b.x(c)", "tuple as its target"),
        ("def f(a):\n    return range(a)", "range outside the head"),
        ("def f(a):\n    raise ValueError(a)", "Raise in f"),
    ],
)
def test_what_the_compilers_reject_is_reported(source: str, problem: str) -> None:
    assert any(problem in reported for reported in problems(source, MODULES))


def test_what_they_accept_is_not_reported() -> None:
    source = (
        "from dataclasses import dataclass\nimport nki.language as nl\n\n@dataclass\nclass C(nl.NKIObject):\n"
        "    x: int\n    y: bool = False\n\n    def toggle(self):\n        self.y = self.y == False\n\n"
        "def f(a, b=1):\n    c, parts = C(a), []\n    for i in range(3):\n        if i % 2 == 0 and 0 <= i < b:\n"
        "            parts.append((i, f'{i}'))\n        else:\n            c.toggle()\n"
        "    for part in parts:\n        assert part[0] >= 0, 'no'\n"
        "    return a[0:2, max(a, b)] if c.y else parts[1:]\n"
    )
    assert list(problems(source, MODULES)) == []


@pytest.mark.parametrize("name", BODIES)
def test_bodies_use_the_dialects_unrolled_loop(name: str) -> None:
    """The first dialect's compiler would turn Python's ``range`` into a loop whose index is a symbol."""
    names = [node.id for node in ast.walk(ast.parse(text(name))) if isinstance(node, ast.Name)]
    assert "range" not in names


def launches(kernels: Any) -> Iterator[tuple[Any, list[TensorSpec]]]:
    """Yield every variant of the second dialect's kernels with the shapes of its tensors."""
    entry, ranks, vector = kernels.entry_nki, Ranks(8, 8, 8, 40), TensorSpec((16,))
    small, large = TensorSpec((128,)), TensorSpec((320,))
    for residual, layout in product((False, True), ("HSB", "BSH")):
        x = TensorSpec((16, 4) if layout == "HSB" else (4, 16))
        extra = [x] if residual else []
        static = {"residual": residual, "layout": layout, "epsilon": 0.1}
        yield entry.low_rank_matmul(8, **static), [x, small, small, *extra]
        yield entry.low_rank_matmul(8, bias=True, **static), [x, small, small, vector, *extra]
        yield entry.low_rank_swiglu_mlp(ranks, **static), [x, small, large, small, large, large, small, *extra]
        yield entry.low_rank_swiglu_mlp_shared(ranks, **static), [x, small, large, large, large, small, *extra]
        x = TensorSpec(x.shape, "bfloat16")
        small8, large8 = TensorSpec((128,), "float8_e4m3"), TensorSpec((320,), "float8_e4m3")
        table, static, extra = TensorSpec((128, 7)), {**static, "scaled": True}, [x] if residual else []
        yield entry.low_rank_matmul(8, bias=True, **static), [x, small8, small8, table, *extra]
        mlp = [x, small8, large8, small8, large8, large8, small8, table, *extra]
        yield entry.low_rank_swiglu_mlp(ranks, **static), mlp
        yield entry.low_rank_swiglu_mlp_shared(ranks, **static), mlp[:3] + mlp[4:]


def test_kernels_get_tensors_numbers_and_tuples(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Solver and packing run before the kernel: every variant of the compiled functions gets plain values only."""
    launched = []

    class Recorded:
        def __init__(self, function: Any) -> None:
            self.function = function

        def __getitem__(self, grid: int) -> Any:
            return lambda *arguments: launched.append((self.function.__name__, arguments))

    monkeypatch.setattr(kernels.entry_nki.nki, "jit", Recorded)
    for launch, tensors in launches(kernels):
        launch(*tensors)
    defined = [n.name for n in ast.parse(text("jitted")).body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
    assert {name for name, _ in launched} == set(defined)

    def plain(value: Any) -> bool:
        return isinstance(value, (bool, int, float)) or (isinstance(value, tuple) and all(map(plain, value)))

    for _, arguments in launched:
        assert all(isinstance(a, TensorSpec) or plain(a) for a in arguments)
        run(lambda arguments=arguments: check_values("kernel", list(arguments)))
        assert isinstance(hash(tuple(a for a in arguments if not isinstance(a, TensorSpec))), int)


def test_the_solver_returns_before_the_kernel_begins(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    solved_in_kernel = []
    original = kernels.entry_nki.jitted.linear

    def solve(problem: Any, core: Any) -> Any:
        solved_in_kernel.append(running[0])
        return tiling.search(problem, core)

    def watched(*arguments: Any) -> Any:
        running[0] = True
        try:
            return original(*arguments)
        finally:
            running[0] = False

    running = [False]
    monkeypatch.setattr("neuronmm.kernels.nki.choice.solve", solve)
    monkeypatch.setattr(kernels.entry_nki.jitted, "linear", watched)
    launch = kernels.entry_nki.low_rank_matmul(8)
    result = launch(np.ones((16, 4), np.float32), np.ones(128, np.float32), np.ones(128, np.float32))
    assert solved_in_kernel == [False] and np.array_equal(result, np.full((16, 4), 128, np.float32))


def test_an_ordinary_object_is_refused_as_an_argument(kernels: Any) -> None:
    """The emulator's rule, on one of the project's own kernels."""
    import nki_cases

    with nki_cases.nki_modules():
        import nki

        kernel = nki.jit(kernels.entry_nki.jitted.linear)
    x, w = np.ones((16, 4), np.float32), np.ones(128, np.float32)
    plan = 16, 8, 1, ((0, 0, 1, 8),)
    with pytest.raises(NkiError, match="NKIObject"):
        kernel[1](x, w, w, plan, plan, kernels.problem.Blocks(), 0.0, False)


def test_the_supported_versions_are_documented() -> None:
    document = (Path(__file__).parents[3] / "docs" / "nki.md").read_text(encoding="utf-8")
    for content in (document.replace("\n", " "), text("entry_nki"), text("dialect_nki"), text("jitted")):
        assert "0.3 to 0.7" in content
