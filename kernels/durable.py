"""Write files that are complete or absent, even after a kill or a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WRITING = ".writing"
"""Suffix of a file's name until the file is complete."""


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk.

    Raises:
        OSError: a file cannot be synced. Some file systems cannot sync a folder; that is not an error.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Call :func:`sync` on a folder and everything in it."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new file to write, which replaces ``path`` when the block ends without an error.

    A reader sees the old file or the new one, never a part of it, whatever interrupts the block. A file has one writer
    at a time.
    """
    new = path.with_name(path.name + WRITING)
    try:
        yield new
        sync(new)
        os.replace(new, path)
        sync(path.parent)
    finally:
        new.unlink(missing_ok=True)
