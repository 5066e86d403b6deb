"""The cache that processes share: its folder, small JSON documents in it, and complete folders.

Both appear complete or not at all, even if several processes write them. A document carries a digest; a damaged one
counts as missing. Nothing depends on a document: if the cache cannot be written, its content is computed again.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neuronmm.kernels.durable import sync, sync_tree

_DAY = 86400  # seconds


def cache_folder() -> Path:
    """Return ``$NEURONMM_CACHE``, or ``~/.cache/neuronmm`` if it is not set.

    Raises:
        OSError: it is not set, and there is no home folder.
    """
    try:
        return Path(os.environ.get("NEURONMM_CACHE") or Path.home() / ".cache" / "neuronmm")
    except RuntimeError:
        raise OSError("there is no home folder for the cache; name a folder in NEURONMM_CACHE") from None


def read(name: str) -> Any:
    """Return the document ``name``, a path below the folder, or None if it is missing or damaged."""
    try:
        stored = json.loads((cache_folder() / name).read_text(encoding="utf-8"))
        return stored["document"] if stored["sha256"] == digest(stored["document"]) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write(name: str, document: Any) -> None:
    """Store ``document`` (JSON types) under ``name`` if the folder can be written."""
    with contextlib.suppress(OSError):
        path = cache_folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=path.stem, dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"document": document, "sha256": digest(document)}, file)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Pass a temporary folder to ``fill`` and rename the result to ``folder``.

    The temporary folder is locked. Those that a killed process left are removed.

    Raises:
        OSError: the folder cannot be written, and no other process has created it in the meantime.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f"{glob.escape(folder.name)}-*/"):
        _remove_abandoned(left)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    lock = os.open(partial, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        # mkdtemp lets nobody but the owner in. Others may read what they may read beside it, but not write.
        partial.chmod(stat.S_IMODE(folder.parent.stat().st_mode) & 0o2755)
        fill(partial)
        sync_tree(partial)
        partial.rename(folder)
        sync(folder.parent)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)


def _remove_abandoned(partial: Path) -> None:
    """Remove a temporary folder of :func:`write_folder` that no process holds and that did not change for a day.

    A process of another machine may fill it: its lock does not show on every file system.
    """
    with contextlib.suppress(OSError):  # it is locked, or gone
        if time.time() - max(entry.stat().st_mtime for entry in (partial, *partial.rglob("*"))) < _DAY:
            return
        lock = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(partial)
        finally:
            os.close(lock)


def digest(document: Any) -> str:
    """Return the SHA-256 of a document, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
