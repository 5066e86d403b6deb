"""The emulated Neuron runtime, shared by all engines on it: the first engine starts it, the last one stops it.

Engines may close in any order, which nested context managers do not allow; hence the reference count.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from neuronmm.models.errors import UserError

Kernels = Literal["nki", "reference"]
Runtime = Literal["hlo", "nxd"]


@dataclass
class _Emulation:
    stack: ExitStack
    session: Any
    runtime: Runtime
    users: int = 0


_open: list[_Emulation] = []


def acquire(kernels: Kernels, runtime: Runtime) -> tuple[Any, Callable[[], None]]:
    """Return the emulation session and the function that releases it, to be called once.

    Raises:
        UserError: another open engine uses a session with other ``kernels``, or another ``runtime``.
    """
    from neuronmm.emulator.runtime import neuron_emulation

    if not _open:
        stack = ExitStack()
        _open.append(_Emulation(stack, stack.enter_context(neuron_emulation(kernels, runtime)), runtime))
    emulation = _open[0]
    session = emulation.session
    if emulation.runtime != runtime:
        raise UserError("an engine that emulates another Neuron host is still open; close it first")
    if session.kernels != kernels:
        raise UserError(f"an engine that emulates with kernels {session.kernels!r} is still open; close it first")
    emulation.users += 1

    def release() -> None:
        emulation.users -= 1
        if not emulation.users:
            _open.remove(emulation)
            emulation.stack.close()

    return session, release
