"""Kernels that break one rule of the emulator in the line marked ``# broken: rule``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from neuronmm.emulator.nki import NkiError, run

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
