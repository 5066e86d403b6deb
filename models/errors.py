"""The one error a person using the tool can mend, and how other libraries' errors become one."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

_LONGEST = 1000  # characters of a message; what a file holds may be quoted in it


class UserError(Exception):
    """Bad input: the message is one line that says what is wrong, where, and what to do.

    The command line prints it and exits with status 2; it never becomes a traceback unless ``--debug`` is given. The
    message may quote a file: characters that cannot be printed are escaped, and a long message is cut.
    """

    def __init__(self, message: str) -> None:
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message[:_LONGEST])
        super().__init__(line if len(message) <= _LONGEST else f"{line}...")


@contextmanager
def reading(problem: str) -> Iterator[None]:
    """Turn what another library raises over a file that it cannot read into a UserError.

    A library that parses a file from a stranger may raise any exception, and which one differs from version to version.
    Use this around calls into such a library only: an error of our own code must not be hidden.

    Args:
        problem: the message up to the library's own words, which follow in brackets.

    Raises:
        UserError: the library failed. Lack of memory passes as it is.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{problem} ({' '.join(str(error).split()) or type(error).__name__})") from error


def first_problem(error: ValidationError) -> tuple[str, str, str]:
    """Where a document fails its schema first: the field's name and a colon, what is wrong with it, its value in short.

    The name is empty where the document as a whole is wrong; the value, there and where the entry is missing.
    """
    first = error.errors(include_url=False)[0]
    try:
        value = reprlib.repr(first["input"]) if first["loc"] and first["type"] != "missing" else ""
    except ValueError:  # Python does not print an int of more than 4300 digits
        value = "a very large number"
    name = ".".join(str(part) for part in first["loc"])
    return f"{name}: " if name else "", first["msg"].removeprefix("Value error, "), value
