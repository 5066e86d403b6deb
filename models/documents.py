"""Read JSON and text files of unknown origin, with a one-line error for every fault; read and write our own JSON.

The parser is pydantic's. It refuses values that JSON does not have (NaN, infinity, a lone surrogate) and nesting that
would exhaust the stack.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from neuronmm.kernels.durable import replacing
from neuronmm.models.errors import UserError, first_problem

MAX_BYTES = 1 << 28
"""The largest document that is read: far larger than any shard index, far smaller than main memory."""

Row = TypeVar("Row", bound=BaseModel)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        UserError: the path is not a regular file, or the file is too large, not UTF-8, not JSON, or not an object.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{path}: larger than {MAX_BYTES >> 20} MB; no such document is that large; download it again")
    try:
        content = from_json(path.read_bytes(), allow_inf_nan=False)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object; download it again")
    return content


def read_own(path: Path) -> dict[str, Any] | None:
    """Return the JSON object that :func:`write_json` wrote to ``path``; None if it is missing or damaged."""
    try:
        return read_object(path)
    except UserError:
        return None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` as indented UTF-8 JSON; a reader sees the old file or the new one, never a part."""
    with replacing(path) as new:
        new.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 text file, without the byte order mark that editors on Windows put before it.

    Raises:
        UserError: the file does not exist, is a folder or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; give a file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def lines(text: str) -> Iterator[tuple[int, str]]:
    r"""Yield the number (from 1) and the content of every line that is not blank.

    Only ``\n`` ends a line: ``str.splitlines`` also splits at U+2028 and U+0085, which a JSON string may contain.
    """
    return ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


def read_rows(path: Path, row: type[Row], example: str) -> list[tuple[str, Row]]:
    """Return the rows of a JSON lines file, each with its location (``file:line``) for messages.

    Args:
        path: the file.
        row: the schema of a line.
        example: an example of a line, for the error message.

    Raises:
        UserError: the file does not exist, or a line does not fit the schema.
    """
    rows = []
    for number, line in lines(read_text(path)):
        where = f"{path}:{number}"
        try:
            rows.append((where, row.model_validate_json(line, strict=True)))
        except ValidationError as error:
            field, problem, _ = first_problem(error)
            raise UserError(f"{where}: {field}{problem}; a row has to be {example}") from None
    return rows
