"""What the compiler of the second dialect takes as a kernel's arguments.

Source: language guide of NKI 0.3 to 0.6 ("NKI Values", "Class Support"), migration guide to NKI 0.3 ("Replace list
kernel arguments with tuples").
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from neuronmm.emulator.nki.machine import current


class NKIObject:
    """The base, and the only one, of each class that a kernel uses."""


def check_values(kernel: str, values: list[Any]) -> None:
    """Raise NkiError for an argument that the compiler does not take."""
    for value in values:
        if isinstance(value, list):
            current().fail("argument", f"{kernel}: a list is no argument of a kernel", "a tuple", "list")
        elif isinstance(value, tuple):
            check_values(kernel, list(value))
        elif isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                current().fail("argument", f"{kernel}: the keys of a dictionary must be strings")
            check_values(kernel, list(value.values()))
        elif not _known(value):
            message = f"{kernel}: the class of an argument must inherit from nki.language.NKIObject"
            current().fail("argument", message, "NKIObject", type(value).__name__)


def _known(value: Any) -> bool:
    plain = value is None or isinstance(value, (bool, int, float, str, Enum, np.generic, np.dtype, type))
    ours = type(value).__module__.startswith("neuronmm.emulator.nki")  # tensors, specifications, operators, buffers
    return plain or ours or isinstance(value, (np.ndarray, NKIObject, Callable))  # type: ignore[arg-type]
