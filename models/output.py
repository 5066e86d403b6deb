"""The rules for output folders: a run never writes over, around or inside its inputs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from neuronmm.kernels.durable import WRITING, sync
from neuronmm.models.errors import UserError
from neuronmm.models.source import expanded

Inputs = Iterable[str | Path | None]
"""The inputs of a run, as the user named them. None and paths that do not exist (a hub id) are ignored."""


def output_folder(out: str | Path) -> Path:
    """Return the absolute path of ``out`` with ``~`` and symlinks resolved. The folder need not exist.

    Raises:
        UserError: ``out`` names the home of an unknown user or is a dangling symlink.
    """
    path = expanded(out)
    if os.path.islink(path) and not os.path.exists(path):
        raise UserError(f"{out}: is a symlink to {os.readlink(path)}, which does not exist; remove it or create that")
    return Path(os.path.realpath(path))


def keep_apart(out: Path, inputs: Inputs, *, may_hold: bool = False) -> None:
    """Check that the folder ``out`` is not an input, is not inside one and, unless ``may_hold``, contains none.

    Raises:
        UserError: the output and an input overlap.
    """
    for name, place in _places(inputs):
        if is_within(out, place):
            raise UserError(f"{out}: is or is inside {name}, which this run reads; give another folder to write")
        if not may_hold and is_within(place, out):
            raise UserError(f"{out}: holds {name}, which this run reads; give another folder to write")


def new_file(out: str | Path, inputs: Inputs) -> Path:
    """Return the absolute path of a file to write, which does not exist.

    Raises:
        UserError: it exists, its folder does not, or it lies in an input.
    """
    path = expanded(out)
    if os.path.lexists(path):
        raise UserError(f"{out}: exists already; give another -o")
    folder = output_folder(path.parent)
    if not folder.is_dir():
        raise UserError(f"{out}: there is no folder {path.parent}; create it, or give another -o")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{out}: the folder {path.parent} cannot be written; give another -o")
    keep_apart(folder / path.name, inputs)
    return folder / path.name


def write_new(path: Path, text: str) -> None:
    """Write a file that did not exist, complete or not at all.

    Raises:
        UserError: it exists now.
        OSError: it cannot be written.
    """
    new = path.with_name(f"{path.name}{WRITING}")
    with new.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            sync(new)
            os.link(new, path)  # unlike a rename, it never replaces a file
        except FileExistsError:
            raise UserError(f"{path}: was created meanwhile; give another -o") from None
        finally:
            new.unlink()
    sync(path.parent)


def stranger_in(folder: Path, known: Iterable[str]) -> Path | None:
    """Return the first entry of ``folder`` that matches none of the ``known`` names, or None.

    A name may be a glob pattern; the name of a folder ends in ``/``.
    """
    patterns = tuple(known)
    for path in sorted(folder.iterdir()):
        name = f"{path.name}/" if path.is_dir() and not path.is_symlink() else path.name
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            return path
    return None


def is_within(path: Path, folder: Path) -> bool:
    """Return whether ``path`` is ``folder`` or inside it. Both are absolute; two names of one folder are equal."""
    return any(_same(each, folder) for each in (path, *path.parents))


def _same(one: Path, other: Path) -> bool:
    return one == other or (os.path.exists(one) and os.path.exists(other) and one.samefile(other))


def _places(inputs: Inputs) -> Iterator[tuple[str | Path, Path]]:
    """Yield each input with each of its locations: the path, the target of a symlink, and the targets of entries."""
    for name in inputs:
        path = None if name is None else expanded(name)
        if name is None or path is None or not os.path.lexists(path):
            continue
        yield name, Path(os.path.realpath(path.parent)) / path.name
        yield name, Path(os.path.realpath(path))
        for entry in path.iterdir() if path.is_dir() else ():
            if entry.is_symlink():
                yield name, Path(os.path.realpath(entry))
