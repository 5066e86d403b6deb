"""Types of the commands' options that argparse lacks: each raises one line that says what the text must be."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def listed(kind: Callable[[str], T], such_as: str) -> Callable[[str], tuple[T, ...]]:
    """Values with commas between."""

    def read(text: str) -> tuple[T, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise ArgumentTypeError(f"{text!r}: must be numbers with commas between, such as {such_as}") from None

    return read


def sizes(counts: tuple[int, ...], such_as: str) -> Callable[[str], tuple[int, ...]]:
    """So many positive whole numbers with commas between."""

    def read(text: str) -> tuple[int, ...]:
        try:
            found = tuple(map(int, text.split(",")))
        except ValueError:
            found = ()
        if len(found) not in counts or min(found) < 1:
            raise ArgumentTypeError(f"{text!r}: must be positive numbers {such_as}")
        return found

    return read


def alignment(text: str) -> str | int:
    """``auto``, or a positive number of ranks."""
    try:
        if text == "auto" or int(text) > 0:
            return text if text == "auto" else int(text)
    except ValueError:
        pass
    raise ArgumentTypeError(f"{text!r}: must be a positive number of ranks, or auto")
