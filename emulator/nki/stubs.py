"""Parts of ``neuronxcc.nki`` that kernels and hosts import but that are not emulated.

Compiler hints and typing annotations have no effect. Direct allocation, on-device timing and AWS's own attention
kernels raise :class:`NkiError` when they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

from neuronmm.emulator.nki.machine import NkiError, current
from neuronmm.emulator.nki.trace import Space

_AWS_KERNELS = ("flash_fwd", "attention_isa_kernel")
"""AWS's kernels that hosts import before they know whether they need them."""


def _hint(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return a decorator that tells the compiler how to work, with or without options: no effect."""
    return (lambda f: f) if function is None else function


def _directive(*arguments: Any, **options: Any) -> None:
    """A directive to the compiler's scheduler: no effect on values."""


def _allocator(space: Space) -> SimpleNamespace:
    def direct(*arguments: Any, **options: Any) -> None:
        current().fail(
            "unsupported", "direct allocation is not emulated: tiles have no addresses here, so none can be reused"
        )

    return SimpleNamespace(alloc=direct, mod_alloc=direct, auto_alloc=lambda: space)


def compiler() -> dict[str, Any]:
    """Return the attributes of ``neuronxcc.nki.compiler``."""
    hints = ("skip_middle_end_transformations", "enable_stack_allocator", "force_auto_alloc")
    directives = ("no_reorder", "multi_buffer")
    return {
        **dict.fromkeys(hints, _hint),
        **dict.fromkeys(directives, _directive),
        "sbuf": _allocator(Space.SBUF),
        "psum": _allocator(Space.PSUM),
    }


def timing_decorator(name: str) -> Callable[..., Any]:
    """Return the SDK decorator ``name``, which times kernels on a device: the decorated kernel raises NkiError."""

    def decorator(*arguments: Any, **options: Any) -> Any:
        def refuse(*tensors: Any, **constants: Any) -> NoReturn:
            raise NkiError(f"nki.{name}", "unsupported", f"nki.{name} times a kernel on a device, and there is none")

        return refuse if arguments and callable(arguments[0]) else lambda function: refuse

    return decorator


def attention_kernels() -> dict[str, Callable[..., Any]]:
    """Return the attributes of ``neuronxcc.nki.kernels.attention``."""
    return {name: _aws_kernel(name) for name in _AWS_KERNELS}


def _aws_kernel(name: str) -> Callable[..., Any]:
    def kernel(*tensors: Any, **options: Any) -> None:
        current().fail("unsupported", f"the SDK's kernel {name} is not emulated: switch it off in the host")

    kernel.__name__ = name
    return kernel


class Annotation:
    """``nki.typing.tensor`` or ``nki.typing.mutable_tensor``, plain or subscripted; ``repr`` gives the name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"nki.typing.{self.name}"

    def __getitem__(self, key: Any) -> Annotation:
        return self


def typing() -> dict[str, Annotation]:
    """Return the attributes of ``nki.typing`` (both dialects)."""
    return {name: Annotation(name) for name in ("tensor", "mutable_tensor")}
