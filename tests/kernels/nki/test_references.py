"""Every NKI kernel has a torch reference beside it, and the two agree.

The half that runs the references against float64 uses no emulator.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from error_rule import assert_twice_plain
from neuronmm.emulator.nki import TensorSpec, run
from neuronmm.kernels import nki as package
from neuronmm.kernels.nki.choice import factor_plan
from neuronmm.kernels.nki.layout import pack
from neuronmm.kernels.nki.objects import Options, factor
from neuronmm.kernels.nki.problem import Blocks
from nki_cases import CORES, to_numpy, to_torch

FOLDER = Path(package.__file__).parent
OUTPUTS = ("y", "out", "act")
SCHEDULE = ("d", "blocks", "tiles", "columns")
"""Parameters of a kernel that say how it computes, not what: the dialect and its block sizes."""


def kernels_of(path: Path) -> dict[str, ast.FunctionDef]:
    """Return the kernels of a file: public functions that take the dialect first, return nothing, and call stages."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    if "neuronmm.kernels.nki.stages" not in imports:
        return {}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    return {f.name: f for f in functions if f.args.args[0].arg == "d" and ast.unparse(f.returns or f) == "None"}


def problems(folder: Path) -> Iterator[str]:
    """Return what is missing beside and in the kernels of a folder."""
    for path in sorted(folder.glob("*.py")):
        sibling = path.with_name(f"{path.stem}_torch.py")
        text = sibling.read_text(encoding="utf-8") if sibling.is_file() else ""
        references = {f.name: f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef)}
        for name, kernel in kernels_of(path).items():
            shared = [a.arg for a in kernel.args.args if a.arg not in (*OUTPUTS, *SCHEDULE)]
            if name not in references:
                yield f"{path.name}: {name} has no reference in {sibling.name}"
            elif (parameters := [a.arg for a in references[name].args.args]) != shared:
                yield f"{sibling.name}: {name} takes {parameters}, its kernel {shared}"
            docstring = ast.get_docstring(kernel) or ""
            if docstring.split("\n\n")[1:2] == [] or not docstring.split("\n\n")[1].startswith("Dimensions:"):
                yield f"{path.name}: the docstring of {name} does not open with its dimensions"
            pseudocode = docstring.partition("Pseudocode::\n\n")[2].splitlines()
            if not 6 <= len(pseudocode) <= 15:
                yield f"{path.name}: the docstring of {name} has {len(pseudocode)} lines of pseudocode, not 6 to 15"


def test_every_kernel_has_a_reference_and_says_what_it_does() -> None:
    assert list(problems(FOLDER)) == []


DOCSTRING = (
    '    """Compute.\n\n    Dimensions:\n        x: [in]\n\n    Pseudocode::\n\n' + "        a\n" * 6 + '    """\n'
)
KERNEL = "from neuronmm.kernels.nki.stages import expand\ndef double(d: Any, x: Any, y: Any) -> None:\n" + DOCSTRING


@pytest.mark.parametrize(
    ("kernel", "reference", "problem"),
    [
        (KERNEL, "def double(x): return 2 * x", None),
        (KERNEL, None, "a.py: double has no reference in a_torch.py"),
        (KERNEL, "def triple(x): return 3 * x", "a.py: double has no reference in a_torch.py"),
        (KERNEL, "def double(z): return 2 * z", "a_torch.py: double takes ['z'], its kernel ['x']"),
        (
            KERNEL.replace("Dimensions", "Sizes"),
            "def double(x): return 2 * x",
            "a.py: the docstring of double does not open with its dimensions",
        ),
        (
            KERNEL.replace("        a\n", "", 1),
            "def double(x): return 2 * x",
            "a.py: the docstring of double has 5 lines of pseudocode, not 6 to 15",
        ),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, kernel: str, reference: str | None, problem: str | None) -> None:
    (tmp_path / "a.py").write_text(kernel)
    if reference is not None:
        (tmp_path / "a_torch.py").write_text(reference)
    assert list(problems(tmp_path)) == ([] if problem is None else [problem])


class Call(NamedTuple):
    """One call of a kernel and of its reference.

    ``named(*tensors)``: the arguments that both take. ``exact`` and ``plain``: the result in float64, and in torch in
    the tensors' dtype.
    """

    name: str
    tensors: list[Tensor]
    named: Callable[..., dict[str, Any]]
    exact: Tensor
    plain: Tensor


def packed(f: Any, rows: int, columns: int, x: Any) -> Any:
    return factor(f, factor_plan(rows, columns, x))


def activation(case: Any, cast: Callable[[Tensor], Tensor]) -> Tensor:
    """``silu(gate(x)) * up(x)`` of an MLP's case without a norm."""
    x, w = cast(case.x), [cast(t) for t in case.weights]
    return silu(w[1] @ (w[0] @ x)) * (w[3] @ (w[2] @ x))


def matmul_calls(kernels: Any, make: Any, tokens: int, dtype: torch.dtype) -> Iterator[Call]:
    for options in ({}, {"norm": True, "residual": True}, {"bias": True, "residual": True, "tokens_first": True}):
        case = make.linear(200, 130, 300, tokens, dtype, **options)
        tensors = [to_torch(array) for array in case.arguments()]
        exact, plain = (y.T if case.tokens_first else y for y in (case.exact(), case.plain()))
        yield Call("low_rank_matmul", tensors, lambda *t, c=case: c.named(kernels, *t), exact, plain)
    case = make.linear(200, 130, 300, tokens, dtype)
    x, (a, b) = case.x, case.weights
    one_matmul = a.double() @ x.double(), a @ x
    both = case.exact(), case.plain()
    for first in (False, True):
        results = [y.T if first else y for y in one_matmul]
        yield Call(
            "packed_matmul", [x.T if first else x, pack(a)],
            lambda x, w, first=first: {"x": x, "w": packed(w, 200, 130, x), "options": Options(tokens_first=first)},
            *results,
        )  # fmt: skip
    yield Call("dense_blocked", [a.T, x], lambda left, right: {"left": left, "right": right}, *one_matmul)
    yield Call("dense_strips", [x, pack(a)], lambda x, w: {"x": x, "f": packed(w, 200, 130, x)}, *one_matmul)
    yield Call("sequential", [x, a.T, b.T], lambda x, u, v: {"x": x, "u": u, "v": v}, both[0].T, both[1].T)
    yield Call(
        "recomputing", [x, pack(a), pack(b)],
        lambda x, a, b: {"x": x, "a": packed(a, 200, 130, x), "b": packed(b, 130, 300, x)}, *both,
    )  # fmt: skip


def mlp_calls(kernels: Any, make: Any, tokens: int, dtype: torch.dtype) -> Iterator[Call]:
    for options in ({}, {"shared": True, "norm": True, "residual": True}, {"tokens_first": True}):
        ranks = (130, 130, 70) if options.get("shared") else (130, 64, 70)
        case = make.mlp(200, 300, ranks, tokens, dtype, **options)
        tensors = [to_torch(array) for array in case.arguments()]
        exact, plain = (y.T if case.tokens_first else y for y in (case.exact(), case.plain()))
        yield Call("low_rank_swiglu_mlp", tensors, lambda *t, c=case: c.named(kernels, *t), exact, plain)
    case = make.mlp(200, 300, (130, 64, 70), tokens, dtype)
    tensors = [to_torch(array) for array in case.arguments()]
    acts = activation(case, Tensor.double), activation(case, lambda t: t)
    yield Call(
        "low_rank_swiglu_mlp", tensors, lambda *t: case.named(kernels, *t, partial=True),
        case.weights[4].double() @ acts[0], case.weights[4] @ acts[1],
    )  # fmt: skip
    yield Call("gate_up", tensors, lambda x, *t: {"x": x, "w": case.factors(kernels, list(t))}, *acts)


def calls(kernels: Any, make: Any, tokens: int, dtype: torch.dtype) -> list[Call]:
    return [*matmul_calls(kernels, make, tokens, dtype), *mlp_calls(kernels, make, tokens, dtype)]


MODULES = {name: path.stem for path in sorted(FOLDER.glob("*.py")) for name in kernels_of(path)}
"""Kernel -> the file it is in."""


def reference(call: Call) -> Tensor:
    function = getattr(import_module(f"neuronmm.kernels.nki.{MODULES[call.name]}_torch"), call.name)
    result: Tensor = function(**call.named(*call.tensors))
    assert result.dtype is torch.float32
    return result


def near(actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error <= 1e-5, f"relative error {error:.3g}"


def test_every_kernel_is_compared(kernels: Any, make: Any) -> None:
    assert {call.name for call in calls(kernels, make, 3, torch.float32)} == set(MODULES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 150])
def test_references_agree_with_float64(kernels: Any, make: Any, dtype: torch.dtype, tokens: int) -> None:
    """For bfloat16 too, as a reference computes in float32; but a norm's weight is packed, and rounded, into A."""
    for call in calls(kernels, make, tokens, dtype):
        if dtype is torch.float32:
            near(reference(call), call.exact)
        else:
            error, plain = ((y.double() - call.exact.double()).norm() for y in (reference(call), call.plain))
            assert error <= plain, call.name


@pytest.mark.parametrize("dialect", ["neuronxcc", "nki"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_kernels_agree_with_their_references(kernels: Any, make: Any, dialect: str, dtype: torch.dtype) -> None:
    schedule = {
        "d": getattr(kernels, f"dialect_{dialect}").Dialect,
        "blocks": lambda: Blocks(tokens=64, moving=64, intermediate=1, panels=2),
        "tiles": lambda: kernels.baselines.Tutorial(1, 1),
        "columns": lambda: 128,
    }
    for call in calls(kernels, make, 150, dtype):
        kernel = getattr(getattr(kernels, MODULES[call.name]), call.name)
        parameters = signature(kernel).parameters
        (output,) = [name for name in OUTPUTS if name in parameters]

        def body(*tensors: Any, call: Call = call, kernel: Any = kernel, output: str = output) -> None:
            how = {name: new() for name, new in schedule.items() if name in signature(kernel).parameters}
            kernel(**how, **call.named(*tensors[:-1]), **{output: tensors[-1]})

        expected = reference(call)
        arrays = [to_numpy(t) for t in call.tensors]
        spec = TensorSpec(tuple(expected.shape), arrays[0].dtype)
        actual = to_torch(run(body, *arrays, outputs=[spec], core=CORES[dialect]).outputs[0])
        if dtype is torch.float32:
            near(actual, expected)
        else:
            assert_twice_plain([call], lambda _, y=actual: y, lambda c: c.plain, lambda _, y=expected: y)
