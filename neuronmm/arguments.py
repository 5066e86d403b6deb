"""Options that argparse lacks. A wrong value raises one line that says what it must be."""

from __future__ import annotations

from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

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


def add_files(parser: ArgumentParser, name: str, help: str, required: bool = False) -> None:
    """Add an option that takes files. Given twice, it takes the files of both."""
    parser.add_argument(
        name, type=Path, nargs="+", action="extend", default=[], required=required, metavar="FILE", help=help
    )


class Once(Action):
    """Stores one value, and refuses a second: the first would go unmeasured without a word."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        first = getattr(namespace, self.dest)
        if first is not self.default:
            raise ArgumentError(self, f"it takes one value, not both {first} and {values}")
        setattr(namespace, self.dest, values)
