"""Files that are whole or absent, after a kill and after a power cut too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WRITING = ".writing"
"""What the name of a file ends in until the file is complete."""


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk.

    Raises:
        OSError: the disk did not take a file. Some file systems cannot sync a folder; that is no error.
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
    """Do as :func:`sync` with a folder and everything in it."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the block a new file to write, which takes the place of ``path`` when the block ends without an error.

    A reader finds the old file or the new one, never a part, whatever interrupts the block.
    """
    new = path.with_name(path.name + WRITING)
    try:
        yield new
        sync(new)
        os.replace(new, path)
        sync(path.parent)
    finally:
        new.unlink(missing_ok=True)
