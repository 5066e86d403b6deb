"""Python's ``range`` in kernels of the first dialect, whose compiler turns it into ``nl.sequential_range``.

While a kernel runs, the modules of its functions that import ``neuronxcc.nki`` see a replaced ``range``: in the head of
a ``for`` statement it yields symbolic indices; elsewhere (a comprehension, ``list(range(n))``) it is Python's own.

Source: programming guide of NKI 2.26 and its reference of ``nl.sequential_range``.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from neuronmm.emulator.nki.language import sequential_range


@contextmanager
def sequential_ranges(kernel: Callable[..., Any]) -> Iterator[None]:
    """Replace ``range`` in the modules of ``kernel`` and of the functions it can call, inside the block."""
    changed = [names for names in _namespaces(kernel) if "range" not in names]
    for names in changed:
        names["range"] = _range
    try:
        yield
    finally:
        for names in changed:
            del names["range"]


def _range(*bounds: Any) -> Any:
    frame = sys._getframe(1)
    if frame.f_lineno in _loop_heads(frame.f_code.co_filename):
        return sequential_range(*(bounds if len(bounds) > 1 else (0, *bounds)))
    return builtins.range(*bounds)


@cache
def _loop_heads(path: str) -> frozenset[int]:
    """Return the lines of a source file where the head of a ``for`` statement calls ``range``."""
    tree = ast.parse("".join(linecache.getlines(path)))
    heads = [n.iter for n in ast.walk(tree) if isinstance(n, ast.For) and isinstance(n.iter, ast.Call)]
    calls = [c for c in heads if isinstance(c.func, ast.Name) and c.func.id == "range"]
    return frozenset(line for c in calls for line in builtins.range(c.lineno, (c.end_lineno or c.lineno) + 1))


def _namespaces(kernel: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Yield the globals of the modules that ``kernel`` can reach by name and that import the first dialect."""
    visited: set[int] = set()
    pending: list[Any] = [kernel]
    while pending:
        value = pending.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, FunctionType):
            names = value.__globals__
            pending += [cell.cell_contents for cell in value.__closure__ or () if _has_value(cell)]
        elif isinstance(value, ModuleType):
            names = vars(value)
        else:
            function = getattr(value, "__dict__", {}).get("function")  # of a Kernel, made by nki.jit
            pending += [function] if function else []
            continue
        if id(names) in visited:
            continue
        visited.add(id(names))
        values = list(names.values())
        if any(isinstance(v, ModuleType) and v.__name__.startswith("neuronxcc.nki") for v in values):
            pending += values
            yield names


def _has_value(cell: Any) -> bool:
    """Return whether the variable of a closure cell is bound yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
