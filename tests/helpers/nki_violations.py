"""Kernels that break one rule of the emulator in the line marked ``# broken``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from neuronmm.emulator.nki import NkiError, run


def assert_breaks(kernel: Callable[..., None], *arguments: Any) -> None:
    """Assert that the run raises an error that names the kernel's file, the marked line and the rule."""
    with pytest.raises(NkiError) as caught:
        run(kernel, *arguments)
    lines, start = inspect.getsourcelines(kernel)
    location = f"{inspect.getsourcefile(kernel)}:{start + next(i for i, s in enumerate(lines) if '# broken' in s)}"
    assert caught.value.location == location
    assert str(caught.value).startswith(f"{location}: ") and caught.value.rule in str(caught.value)
