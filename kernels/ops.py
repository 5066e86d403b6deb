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

import torch
from torch import Tensor

from neuronmm.kernels.errors import KernelError
from neuronmm.kernels.factors import Form, LowRank
from neuronmm.kernels.low_bits import Weight


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


def width_after(width: int, factors: LowRank) -> int:
    """Check the shapes of ``factors`` for an input of ``width`` features and return the width of the result.

    Pivots that are a tensor are checked for dtype and shape only.
    """
    bias, out = factors.bias, factors.out_features
    fits = factors.in_features == width and factors.B.shape[1] == factors.rank
    if not fits or (bias is not None and bias.shape != (out,)):
        shapes = (
            f"A {list(factors.A.shape)}, B {list(factors.B.shape)}, bias {'none' if bias is None else list(bias.shape)}"
        )
        form = "" if factors.form is Form.TWO else f" in the form {factors.form.value}"
        raise KernelError(f"input of width {width}, {shapes}{form} do not fit")
    problem = _pivot_problem(factors)
    if problem is not None:
        raise KernelError(problem)
    return out


def _pivot_problem(factors: LowRank) -> str | None:
    """Return what is wrong with the pivots, or None. The values of a tensor are not read."""
    form, rank, pivots = factors.form, factors.rank, factors.pivots
    if form is not Form.ROWS:
        return None if pivots is None else f"the form {form.value} takes no pivots"
    if isinstance(pivots, int):
        last = factors.out_features - rank
        return None if 0 <= pivots <= last else f"first pivot {pivots} is not in [0, {last}]"
    if not isinstance(pivots, Tensor):
        return "the form rows needs pivots: the first of a range, or an int32 tensor"
    if pivots.dtype != torch.int32 or pivots.shape != (rank,):
        return f"pivots {list(pivots.shape)} of {pivots.dtype}, they have to be [{rank}] of torch.int32"
    return None


def low_rank_linear(
    x: Tensor,
    A: Weight,
    B: Weight,
    bias: Tensor | None = None,
    form: Form = Form.TWO,
    pivots: int | Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """``y = W' x + bias``. In the form TWO, ``W' = B A``: the paper's XUV (arXiv 2510.25977) with U = A^T and V = B^T.

    Dimensions: ``x`` [..., in], result [..., out]; the other arguments are those of :class:`LowRank`. All are on one
    device and have one dtype, except that A and B may have few bits (:class:`Int8`, :class:`Int4`) and that ``pivots``
    may be an int32 tensor.

    Raises:
        KernelError: the shapes do not fit together, or a named ``impl`` does not support the call.
    """
    factors = LowRank(A, B, bias, form, pivots)
    width_after(x.shape[-1], factors)
    return choose(Op.LINEAR, impl, x, factors).run(x, factors)


def low_rank_swiglu(x: Tensor, gate: LowRank, up: LowRank, down: LowRank, *, impl: str = "auto") -> Tensor:
    """Compute ``down(silu(gate(x)) * up(x))`` with three factorised linears.

    Dimensions: ``x`` [..., hidden]; gate and up: hidden -> intermediate, down: intermediate -> hidden, each with its
    own rank and form; result [..., hidden]. If gate and up share one A, A x is computed once.

    Raises:
        KernelError: the shapes do not fit together, or a named ``impl`` does not support the call.
    """
    wide = width_after(x.shape[-1], gate)
    if width_after(x.shape[-1], up) != wide:
        raise KernelError(f"gate and up differ in width: {wide} and {up.out_features}")
    width_after(wide, down)
    return choose(Op.SWIGLU, impl, x, gate, up, down).run(x, gate, up, down)


# They import this module and fill its table.
from neuronmm.kernels import cpu, plain, reference  # noqa: E402, F401
