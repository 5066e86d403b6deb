"""Where a command may write: never over, around or inside what it reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from neuronmm.models.errors import UserError
from neuronmm.models.source import expanded

Inputs = Iterable[str | Path | None]
"""What a run reads, as the user named it. None and what is not on this disk (a hub id) are passed over."""


def output_folder(out: str | Path) -> Path:
    """The absolute path of the folder that ``out`` names, ``~`` and symlinks resolved; the folder need not exist.

    Raises:
        UserError: ``out`` names an unknown user's home or is a symlink to nothing.
    """
    given = expanded(out)
    if os.path.islink(given) and not os.path.exists(given):
        raise UserError(f"{out}: is a symlink to {os.readlink(given)}, which does not exist; remove it or make that")
    return Path(os.path.realpath(given))


def keep_apart(out: Path, inputs: Inputs, *, may_hold: bool = False) -> None:
    """Check that the folder ``out`` is none of ``inputs``, lies in none and, but with ``may_hold``, holds none.

    Raises:
        UserError: it is, does or holds one.
    """
    for given, place in _places(inputs):
        if is_within(out, place):
            raise UserError(f"{out}: is or lies in {given}, which this run reads; give another folder to write")
        if not may_hold and is_within(place, out):
            raise UserError(f"{out}: holds {given}, which this run reads; give another folder to write")


def stranger_in(folder: Path, known: Iterable[str]) -> Path | None:
    """The first entry of ``folder`` that has none of the ``known`` names, None if all have.

    A name may be a glob pattern; one of a folder ends in ``/``.
    """
    patterns = tuple(known)
    for path in sorted(folder.iterdir()):
        name = f"{path.name}/" if path.is_dir() and not path.is_symlink() else path.name
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            return path
    return None


def is_within(path: Path, folder: Path) -> bool:
    """Whether ``path`` is ``folder`` or lies in it; both are absolute. Names of one folder count as the same."""
    return any(_same(each, folder) for each in (path, *path.parents))


def _same(one: Path, other: Path) -> bool:
    return one == other or (os.path.exists(one) and os.path.exists(other) and one.samefile(other))


def _places(inputs: Inputs) -> Iterator[tuple[str | Path, Path]]:
    """Each input with each place where something of it lies: a symlink lies in two, a folder may be made of them."""
    for given in inputs:
        path = None if given is None else expanded(given)
        if given is None or path is None or not os.path.lexists(path):
            continue
        yield given, Path(os.path.realpath(path.parent)) / path.name
        yield given, Path(os.path.realpath(path))
        for entry in path.iterdir() if path.is_dir() else ():
            if entry.is_symlink():
                yield given, Path(os.path.realpath(entry))
