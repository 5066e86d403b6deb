"""A kernel that breaks one rule of the emulator, in the line marked ``# broken``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from neuronmm.emulator.nki import NkiError, run


def assert_breaks(kernel: Callable[..., None], *arguments: Any) -> None:
    """The run ends in an error that names the kernel's file, the marked line and the rule."""
    with pytest.raises(NkiError) as caught:
        run(kernel, *arguments)
    lines, start = inspect.getsourcelines(kernel)
    place = f"{inspect.getsourcefile(kernel)}:{start + next(i for i, s in enumerate(lines) if '# broken' in s)}"
    assert caught.value.location == place
    assert str(caught.value).startswith(f"{place}: ") and caught.value.rule in str(caught.value)
