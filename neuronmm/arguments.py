"""Types of options that argparse lacks. Each raises one line that says what the text must be."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def listed(kind: Callable[[str], T], such_as: str) -> Callable[[str], tuple[T, ...]]:
    """Return a parser of comma-separated values of type ``kind``."""

    def read(text: str) -> tuple[T, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise ArgumentTypeError(f"{text!r}: must be comma-separated numbers such as {such_as}") from None

    return read


def sizes(counts: tuple[int, ...], such_as: str) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of comma-separated positive integers, whose number must be one of ``counts``."""

    def read(text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(map(int, text.split(",")))
        except ValueError:
            numbers = ()
        if len(numbers) not in counts or min(numbers) < 1:
            raise ArgumentTypeError(f"{text!r}: must be positive numbers {such_as}")
        return numbers

    return read


def alignment(text: str) -> str | int:
    """Parse ``auto`` or a positive number of ranks."""
    try:
        if text == "auto" or int(text) > 0:
            return text if text == "auto" else int(text)
    except ValueError:
        pass
    raise ArgumentTypeError(f"{text!r}: must be a positive number of ranks, or auto")
