"""The contract between a kernel and its caller: the arguments it accepts, the inputs it may write, its outputs.

Source for the arguments of the second dialect: language guide of NKI 0.3 to 0.6 ("NKI Values", "Class Support"),
migration guide to NKI 0.3 ("Replace list kernel arguments with tuples").
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

from neuronmm.emulator.nki.machine import Machine, NkiError, current
from neuronmm.emulator.nki.tile import Tile

FIRST, SECOND = "neuronxcc", "nki"
"""The dialects, each named after its package."""


class NKIObject:
    """``nki.language.NKIObject``: the only base class of the classes that a kernel of the second dialect uses."""


def check_values(kernel: str, values: list[Any]) -> None:
    """Raise NkiError if the compiler of the second dialect does not accept one of ``values`` as a kernel argument."""
    for value in values:
        if isinstance(value, list):
            current().fail("argument", f"{kernel}: a kernel takes no list as an argument", "a tuple", "list")
        elif isinstance(value, tuple):
            check_values(kernel, list(value))
        elif isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                current().fail("argument", f"{kernel}: the keys of a dictionary must be strings")
            check_values(kernel, list(value.values()))
        elif not _is_accepted(value):
            message = f"{kernel}: the class of an argument must inherit from nki.language.NKIObject"
            current().fail("argument", message, "NKIObject", type(value).__name__)


def _is_accepted(value: Any) -> bool:
    is_plain = value is None or isinstance(value, (bool, int, float, str, Enum, np.generic, np.dtype, type))
    is_emulated = type(value).__module__.startswith("neuronmm.emulator.nki")  # tiles, TensorSpecs, operators, buffers
    return is_plain or is_emulated or isinstance(value, (np.ndarray, NKIObject, Callable))  # type: ignore[arg-type]


def protect_inputs(function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Make each tensor argument read-only unless its parameter is annotated ``nki.typing.mutable_tensor``."""
    parameters = inspect.signature(function).parameters
    bound = {**dict(zip(parameters, arguments, strict=False)), **named}
    for name, parameter in parameters.items():
        if isinstance(bound.get(name), Tile):
            bound[name].storage.read_only = "mutable_tensor" not in str(parameter.annotation)


def check_outputs(machine: Machine, function: Callable[..., Any], dialect: str, outputs: Sequence[Any]) -> None:
    """Raise NkiError if an output was never written or, in the second dialect, is not in shared HBM."""
    written = {region.buffer for step in machine.trace.instructions for region in step.writes}
    shared = [tile.storage for tile in machine.shared_tensors]
    code = getattr(inspect.unwrap(function), "__code__", None)
    for tile in outputs:
        storage = tile.storage
        record, is_argument = storage.record, storage.record.kernel_argument
        where = f"{code.co_filename}:{code.co_firstlineno}" if is_argument and code else record.location
        if dialect == SECOND and not is_argument and storage not in shared:
            raise NkiError(where, "output", "an output must be in shared_hbm", "shared_hbm", record.space.value)
        if record.id not in written and not storage.preset:
            raise NkiError(where, "unwritten output", f"the kernel never writes {record.name or 'this output'}")
