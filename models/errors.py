"""The error that a user can fix, and the conversion of other libraries' errors into it."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

_MAX_LENGTH = 1000  # characters; a message may quote the content of a file


class UserError(Exception):
    """Bad input: the message is one line that says what is wrong, where, and what to do.

    The command line prints it and exits with status 2, without a traceback unless ``--debug`` is given. The message may
    quote a file, so unprintable characters are escaped and a long message is cut.
    """

    def __init__(self, message: str) -> None:
        line = printable(message[:_MAX_LENGTH])
        super().__init__(line if len(message) <= _MAX_LENGTH else f"{line}...")


def printable(text: str) -> str:
    """Return ``text``, which may be of unknown origin, on one line and without characters that control a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def lacks_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, in Python or in torch, which raises a plain RuntimeError."""
    messages = ("can't allocate memory", "out of memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(message in str(error) for message in messages)
    )


@contextmanager
def reading(problem: str) -> Iterator[None]:
    """Turn any exception of another library that reads a file into a UserError.

    A parser may raise any exception on a malformed file, and its type changes between versions. Use this only around
    calls into such a library, so that it cannot hide an error of our own code.

    Args:
        problem: the message; the library's own message is appended in brackets.

    Raises:
        UserError: the library failed. What a lack of memory raises passes through unchanged.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if lacks_memory(error):
            raise
        raise UserError(f"{problem} ({' '.join(str(error).split()) or type(error).__name__})") from error


@contextmanager
def without_panics() -> Iterator[None]:
    """Turn the panic of a library in Rust, which is no Exception, into a UserError; tokenizers has them.

    Raises:
        UserError: the library failed.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3 exports no class to import
            raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"the model's tokenizer, or another of its files, does not work on this text ({reason}); download it again"
        ) from None


def first_problem(error: ValidationError) -> tuple[str, str, str]:
    """Return the first violation of a schema: ``"field: "``, what is wrong, and the value, abbreviated.

    The field is empty if the document as a whole is wrong; the value is empty then and if the entry is missing.
    """
    first = error.errors(include_url=False)[0]
    try:
        value = reprlib.repr(first["input"]) if first["loc"] and first["type"] != "missing" else ""
    except ValueError:  # Python does not print an int of more than 4300 digits
        value = "a very large number"
    name = ".".join(str(part) for part in first["loc"])
    return f"{name}: " if name else "", first["msg"].removeprefix("Value error, "), value
