"""A folder that one process has marked and locked for itself, until it releases the folder or ends."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from socket import gethostname

from neuronmm.models.errors import UserError

MARK = "neuronmm.lock"
"""The file that marks a folder in which neuronmm works. The process that works there locks it and writes its id."""


class Claim:
    """The lock on ``folder``, which is created if it is missing. The operating system frees the lock after a kill.

    Raises:
        UserError: another process holds the lock, or the folder cannot be created or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._created = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
        try:
            self._handle = self._lock()
            if not _is_mark(self._handle):  # for example a hard link to another file
                os.close(self._handle)
                raise UserError(f"{folder / MARK}: was not written by neuronmm; move it away, or give another folder")
            holder = {"pid": os.getpid(), "host": gethostname()}
            since = datetime.now().astimezone().isoformat(" ", "seconds")
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, json.dumps({**holder, "since": since}).encode(), 0)
        except OSError as error:
            _remove_empty(self._created)
            raise UserError(f"{folder}: cannot be written ({error.strerror}); give another folder") from None

    def empty(self) -> bool:
        """Return whether the folder holds nothing but the mark."""
        return all(path.name == MARK for path in self.folder.iterdir())

    def clear(self) -> None:
        """Remove everything in the folder but the mark."""
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARK:
                path.unlink()

    def release(self) -> None:
        """Release the lock; the folder keeps its mark."""
        os.close(self._handle)

    def unmark(self) -> None:
        """Release the lock and remove the mark."""
        (self.folder / MARK).unlink(missing_ok=True)
        self.release()

    def remove(self) -> None:
        """Remove the folder, its mark last, and the empty folders above it that were created for it."""
        self.clear()
        self.unmark()
        _remove_empty([self.folder, *self._created])

    def _lock(self) -> int:
        mark = self.folder / MARK
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            with ExitStack() as undo, suppress(FileNotFoundError):  # another process has just removed the folder
                handle = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                undo.callback(os.close, handle)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UserError(f"{self.folder}: {_holder(handle)}; wait for it, or give another folder") from None
                if os.path.samestat(os.fstat(handle), os.stat(mark)):
                    undo.pop_all()
                    return handle


def _remove_empty(folders: list[Path]) -> None:
    """Remove the empty ones of ``folders``."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _is_mark(handle: int) -> bool:
    """Return whether the file is empty, because it is new, or has the content that a :class:`Claim` writes."""
    content = os.pread(handle, 4096, 0)
    try:
        return not content or {"pid", "host", "since"} <= set(json.loads(content))
    except (ValueError, TypeError):
        return False


def _holder(handle: int) -> str:
    """Return which process works there, for a message."""
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        return f"process {holder['pid']} on {holder['host']} has been at work there since {holder['since']}"
    except (ValueError, LookupError, TypeError):  # it has not written its id yet
        return "another process is at work there"
