"""The dispatch table: the ops, their implementations, and the choice of an implementation for a call.

Callers name an op and, if they must, an implementation; they never branch on hardware. ``auto`` selects the fastest
implementation that supports the call and may fall back. A named implementation that does not support the call raises
:class:`KernelError` with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

from torch import Tensor

from neuronmm.kernels.int8 import Int8, Weight


class KernelError(RuntimeError):
    """A named implementation does not exist or does not support the call; the message gives the reason."""


class LowRank(NamedTuple):
    """One factorised linear ``y = B (A x) + bias``.

    Dimensions: ``A`` [r, in], ``B`` [out, r], ``bias`` [out] or None. All are on one device and have one float dtype,
    except for factors that are :class:`Int8`.
    """

    A: Weight
    B: Weight
    bias: Tensor | None = None

    def shares_a(self, other: LowRank) -> bool:
        """Return whether both use the same A tensor, so that A x is computed only once."""
        one, two = (linear.A.values if isinstance(linear.A, Int8) else linear.A for linear in (self, other))
        return one is two


class Op(str, Enum):
    """The ops that every target implements."""

    LINEAR = "low_rank_linear"
    SWIGLU = "low_rank_swiglu"


@dataclass(frozen=True)
class Implementation:
    """One implementation of one op.

    ``refuses(x, *factors)`` returns None if it supports the call, otherwise the reason why not. ``priority`` orders the
    automatic choice, highest first; an implementation below zero is never chosen automatically.
    """

    op: Op
    name: str
    run: Callable[..., Tensor]
    refuses: Callable[..., str | None]
    priority: int


_TABLE: dict[tuple[Op, str], Implementation] = {}
_FELL_BACK: set[tuple[Op, str]] = set()
_log = logging.getLogger(__name__)


def register(op: Op, name: str, *, refuses: Callable[..., str | None], priority: int) -> Callable[[Callable], Callable]:
    """Return a decorator that adds a function ``run(x, *factors) -> Tensor`` to the table."""

    def enter(run: Callable) -> Callable:
        if (op, name) in _TABLE:
            raise ValueError(f"{op.value} already has an implementation named {name!r}")
        _TABLE[op, name] = Implementation(op, name, run, refuses, priority)
        implementations.cache_clear()
        return run

    return enter


@cache
def implementations(op: Op) -> tuple[Implementation, ...]:
    """Return all implementations of ``op``, in the order in which the automatic choice tries them."""
    return tuple(sorted((i for i in _TABLE.values() if i.op is op), key=lambda i: -i.priority))


def choose(op: Op, impl: str, x: Tensor, *factors: LowRank) -> Implementation:
    """Return the implementation for this call.

    Raises:
        KernelError: ``impl`` is unknown, or does not support these tensors.
    """
    if impl == "auto":
        return _first_that_serves(op, x, *factors)
    implementation = _TABLE.get((op, impl))
    if implementation is None:
        known = ", ".join(i.name for i in implementations(op))
        raise KernelError(f"{op.value} has no implementation named {impl!r}; there are: auto, {known}")
    reason = implementation.refuses(x, *factors)
    if reason is not None:
        raise KernelError(f"{op.value} cannot run on {impl!r}: {reason}")
    return implementation


def _first_that_serves(op: Op, x: Tensor, *factors: LowRank) -> Implementation:
    """Return the automatic choice. Each implementation that it skips is logged once."""
    for candidate in implementations(op):
        if candidate.priority < 0:
            break
        reason = candidate.refuses(x, *factors)
        if reason is None:
            return candidate
        if (op, candidate.name) not in _FELL_BACK:
            _FELL_BACK.add((op, candidate.name))
            _log.info("%s falls back from %s: %s", op.value, candidate.name, reason)
    raise KernelError(f"no implementation of {op.value} can serve this call")


def _width_after(width: int, factors: LowRank) -> int:
    """Check the shapes of ``factors`` for an input of ``width`` features and return the width of the result."""
    (rank, into), (out, inner) = factors.A.shape, factors.B.shape
    if into != width or inner != rank or (factors.bias is not None and factors.bias.shape != (out,)):
        bias = "none" if factors.bias is None else list(factors.bias.shape)
        raise KernelError(f"input of width {width}, A [{rank}, {into}], B [{out}, {inner}], bias {bias} do not fit")
    return out


def low_rank_linear(x: Tensor, A: Weight, B: Weight, bias: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """Compute ``y = B (A x) + bias``, the paper's XUV (arXiv 2510.25977) with U = A^T and V = B^T.

    Dimensions: ``x`` [..., in], ``A`` [r, in], ``B`` [out, r], result [..., out]. All are on one device and have one
    dtype, except that A and B may be :class:`Int8`.

    Raises:
        KernelError: the shapes do not fit together, or a named ``impl`` does not support the call.
    """
    factors = LowRank(A, B, bias)
    _width_after(x.shape[-1], factors)
    return choose(Op.LINEAR, impl, x, factors).run(x, factors)


def low_rank_swiglu(x: Tensor, gate: LowRank, up: LowRank, down: LowRank, *, impl: str = "auto") -> Tensor:
    """Compute ``down(silu(gate(x)) * up(x))`` with three factorised linears.

    Dimensions: ``x`` [..., hidden]; gate and up: hidden -> intermediate, down: intermediate -> hidden, each with its
    own rank; result [..., hidden]. If gate and up share one A, A x is computed once.

    Raises:
        KernelError: the shapes do not fit together, or a named ``impl`` does not support the call.
    """
    wide = _width_after(x.shape[-1], gate)
    if _width_after(x.shape[-1], up) != wide:
        raise KernelError(f"gate and up differ in width: {wide} and {up.B.shape[0]}")
    _width_after(wide, down)
    return choose(Op.SWIGLU, impl, x, gate, up, down).run(x, gate, up, down)
