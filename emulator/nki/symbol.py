"""The index of a loop that the compiler of the first dialect does not unroll: a symbol, not a number.

The compiler traces the body of such a loop once. The index may appear in affine expressions that address a tile, and in
comparisons that make a mask. Python code that needs its value (a list index, a branch, the bound of another loop) would
silently use the symbol; the emulator raises NkiError instead.

Source: programming guide of NKI 2.26, "loop iterators"; migration guide to NKI 0.2, "consistent control flow".
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from neuronmm.emulator.nki.machine import current


class LoopIndex:
    """A symbolic iteration number; only the emulator reads ``value``."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def _concrete(self) -> NoReturn:
        _refuse("the index of a loop that is not unrolled is a symbol: Python cannot index a list or branch with it")

    __index__ = __int__ = __float__ = __bool__ = __hash__ = _concrete  # type: ignore[assignment]

    def __add__(self, other: Any) -> Any:
        return LoopIndex(self.value + number(other)) if _scalar(other) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return LoopIndex(self.value - number(other)) if _scalar(other) else NotImplemented

    def __rsub__(self, other: Any) -> Any:
        return LoopIndex(number(other) - self.value) if _scalar(other) else NotImplemented

    def __neg__(self) -> LoopIndex:
        return LoopIndex(-self.value)

    def __mul__(self, factor: Any) -> Any:
        return LoopIndex(self.value * factor) if _constant(factor) else NotImplemented

    __rmul__ = __mul__

    def __floordiv__(self, divisor: Any) -> Any:
        return LoopIndex(self.value // divisor) if _constant(divisor) else NotImplemented

    def __mod__(self, divisor: Any) -> Any:
        return LoopIndex(self.value % divisor) if _constant(divisor) else NotImplemented

    def __eq__(self, other: Any) -> Any:
        return predicate(self.value == number(other)) if _scalar(other) else NotImplemented

    def __ne__(self, other: Any) -> Any:
        return predicate(self.value != number(other)) if _scalar(other) else NotImplemented

    def __lt__(self, other: Any) -> Any:
        return predicate(self.value < number(other)) if _scalar(other) else NotImplemented

    def __le__(self, other: Any) -> Any:
        return predicate(self.value <= number(other)) if _scalar(other) else NotImplemented

    def __gt__(self, other: Any) -> Any:
        return predicate(self.value > number(other)) if _scalar(other) else NotImplemented

    def __ge__(self, other: Any) -> Any:
        return predicate(self.value >= number(other)) if _scalar(other) else NotImplemented

    def __repr__(self) -> str:
        return f"LoopIndex({self.value})"


class Predicate(np.ndarray):
    """A comparison of indices: valid as the mask of an instruction, not as a condition in Python."""

    def __bool__(self) -> NoReturn:  # noqa: PLE0304
        _refuse("control flow cannot depend on a loop's index or on nl.arange: use mask=, or nl.static_range")

    def __and__(self, other: Any) -> Any:
        return np.bitwise_and(self, other).view(CombinedPredicate)

    def __or__(self, other: Any) -> Any:
        return np.bitwise_or(self, other).view(CombinedPredicate)


class CombinedPredicate(Predicate):
    """Several comparisons combined by ``&`` or ``|``: a mask, but not a predicate of ``affine_select``."""


def predicate(values: Any) -> Predicate:
    """Return booleans as a :class:`Predicate`."""
    return np.asarray(values).view(Predicate)


def number(value: Any) -> int:
    """Return the integer behind an index."""
    return value.value if isinstance(value, LoopIndex) else int(value)


def _scalar(value: Any) -> bool:
    return isinstance(value, LoopIndex) or _constant(value)


def _constant(value: Any) -> bool:
    """Return whether ``value`` is an integer; raise NkiError for a float or symbol, which is not affine."""
    if isinstance(value, (float, LoopIndex)):
        _refuse(f"an expression of a loop's index and {value!r} is not affine")
    return isinstance(value, int)


def _refuse(message: str) -> NoReturn:
    current().fail("symbolic index", message, "nl.static_range, which is unrolled", "nl.affine_range or sequential")
