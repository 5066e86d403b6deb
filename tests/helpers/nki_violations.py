"""Kernels that break one rule of the emulator in the line marked ``# broken: rule``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from neuronmm.emulator.nki import NkiError, nki_modules, run

with nki_modules():
    import nki.language as nl

F32 = np.float32
_MARK = "# broken: "


def assert_breaks(kernel: Callable[..., None], *arguments: Any) -> None:
    """Assert that the run raises an error that names the kernel's file, the marked line and its rule."""
    with pytest.raises(NkiError) as caught:
        run(kernel, *arguments)
    lines, start = inspect.getsourcelines(kernel)
    ((line, rule),) = [(start + i, s.partition(_MARK)[2].strip()) for i, s in enumerate(lines) if _MARK in s]
    location = f"{inspect.getsourcefile(kernel)}:{line}"
    assert (caught.value.location, caught.value.rule) == (location, rule)
    assert str(caught.value).startswith(f"{location}: ") and str(caught.value).endswith(f"[{rule}]")


def sbuf(*shape: int, dtype: Any = F32) -> Any:
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def psum(*shape: int) -> Any:
    return nl.ndarray(shape, dtype=F32, buffer=nl.psum)


def violations(module: Mapping[str, Any]) -> list[Callable[..., None]]:
    """Return the kernels among a module's globals: its functions of one parameter ``x``."""
    functions = (value for value in module.values() if inspect.isfunction(value))
    return [function for function in functions if list(inspect.signature(function).parameters) == ["x"]]
