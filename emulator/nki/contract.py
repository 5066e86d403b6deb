"""What a kernel owes its caller: inputs stay as they are, outputs are written and lie where a host finds them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from neuronmm.emulator.nki.errors import NkiError
from neuronmm.emulator.nki.machine import Machine
from neuronmm.emulator.nki.tile import Tile

FIRST, SECOND = "neuronxcc", "nki"
"""The dialects by the package that has them."""


def protect(function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Let the kernel write only those of its arguments that it annotates ``nki.typing.mutable_tensor``."""
    parameters = inspect.signature(function).parameters
    given = {**dict(zip(parameters, arguments, strict=False)), **named}
    for name, parameter in parameters.items():
        if isinstance(given.get(name), Tile):
            given[name].storage.immutable = "mutable_tensor" not in str(parameter.annotation)


def check_outputs(machine: Machine, function: Callable[..., Any], dialect: str, outputs: Sequence[Any]) -> None:
    """Raise if an output was never written, or does not lie where the dialect asks for."""
    written = {region.buffer for step in machine.trace.instructions for region in step.writes}
    shared = [tile.storage for tile in machine.shared]
    code = getattr(inspect.unwrap(function), "__code__", None)
    for tile in outputs:
        storage = tile.storage
        record, given = storage.record, storage.record.kernel_argument
        where = f"{code.co_filename}:{code.co_firstlineno}" if given and code else record.location
        if dialect == SECOND and not given and storage not in shared:
            raise NkiError(where, "output", "an output must be in shared_hbm", "shared_hbm", record.space.value)
        if record.id not in written and not storage.filled:
            raise NkiError(where, "unwritten output", f"the kernel never writes {record.name or 'this output'}")
