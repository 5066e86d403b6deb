"""``neuronxcc.nki.compiler`` and the timing decorators: hints pass, what needs addresses or a device refuses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

from neuronmm.emulator.nki.errors import NkiError
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.trace import Space


def _hint(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """A decorator that only tells the compiler how to work."""
    return (lambda f: f) if function is None else function


def _directive(*arguments: Any, **options: Any) -> None:
    """A directive for the compiler's scheduler: it changes no value."""


def _allocator(space: Space) -> SimpleNamespace:
    def direct(*arguments: Any, **options: Any) -> None:
        current().fail(
            "unsupported", "direct allocation is not emulated: tiles have no addresses here, so none can be reused"
        )

    return SimpleNamespace(alloc=direct, mod_alloc=direct, auto_alloc=lambda: space)


def compiler(name: str) -> dict[str, dict[str, Any]]:
    """The module ``name`` (module name -> attributes)."""
    hints = ("skip_middle_end_transformations", "enable_stack_allocator", "force_auto_alloc")
    directives = ("no_reorder", "multi_buffer")
    return {
        name: {
            **dict.fromkeys(hints, _hint),
            **dict.fromkeys(directives, _directive),
            "sbuf": _allocator(Space.SBUF),
            "psum": _allocator(Space.PSUM),
        }
    }


def measured(name: str) -> Callable[..., Any]:
    """A decorator of the SDK that times kernels on a device: it decorates, and the call refuses."""

    def decorator(*arguments: Any, **options: Any) -> Any:
        def refuse(*tensors: Any, **constants: Any) -> NoReturn:
            raise NkiError(f"nki.{name}", "unsupported", f"nki.{name} times a kernel on a device, and there is none")

        return refuse if arguments and callable(arguments[0]) else lambda function: refuse

    return decorator
