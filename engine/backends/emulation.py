"""The emulated Neuron runtime, shared by all engines that run on it: started by the first, stopped by the last.

Engines may close in any order, which nested context managers do not allow; hence the reference count.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from neuronmm.models.errors import UserError

Kernels = Literal["nki", "reference"]


@dataclass
class _Held:
    stack: ExitStack
    session: Any
    users: int = 0


_held: list[_Held] = []


def hold(kernels: Kernels) -> tuple[Any, Callable[[], None]]:
    """Return the emulation session and the function that releases it, to be called once.

    Raises:
        UserError: another open engine uses a session with other ``kernels``.
    """
    from neuronmm.emulator.runtime import neuron_emulation

    if not _held:
        stack = ExitStack()
        _held.append(_Held(stack, stack.enter_context(neuron_emulation(kernels=kernels))))
    held = _held[0]
    if held.session.kernels != kernels:
        raise UserError(f"an engine that emulates with kernels {held.session.kernels!r} is still open; close it first")
    held.users += 1

    def let_go() -> None:
        held.users -= 1
        if not held.users:
            _held.remove(held)
            held.stack.close()

    return held.session, let_go
