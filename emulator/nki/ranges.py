"""Python's ``range`` in kernels of the first dialect, whose compiler turns it into ``nl.sequential_range``.

While a kernel runs, the modules of its functions that import ``neuronxcc.nki`` see another ``range``: in the head of a
``for`` statement it gives symbolic indices, everywhere else (a comprehension, ``list(range(n))``) it is Python's own.

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
    """``range`` as the compiler reads it, in the modules of ``kernel`` and of what it can call."""
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
    """The lines of a source file where a ``for`` statement calls ``range``."""
    tree = ast.parse("".join(linecache.getlines(path)))
    heads = [n.iter for n in ast.walk(tree) if isinstance(n, ast.For) and isinstance(n.iter, ast.Call)]
    calls = [c for c in heads if isinstance(c.func, ast.Name) and c.func.id == "range"]
    return frozenset(line for c in calls for line in builtins.range(c.lineno, (c.end_lineno or c.lineno) + 1))


def _namespaces(kernel: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """The modules of the kernel and of the functions and modules it names, as far as they import the dialect."""
    seen: set[int] = set()
    waiting: list[Any] = [kernel]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            names = value.__globals__
            waiting += [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        elif isinstance(value, ModuleType):
            names = vars(value)
        else:
            waiting += [f for f in [getattr(value, "__dict__", {}).get("function")] if f]  # what nki.jit makes
            continue
        if id(names) in seen:
            continue
        seen.add(id(names))
        values = list(names.values())
        if any(isinstance(v, ModuleType) and v.__name__.startswith("neuronxcc.nki") for v in values):
            waiting += values
            yield names


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
