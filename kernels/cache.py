"""The cache that processes share: its folder, small JSON documents in it, and complete folders.

Both appear complete or not at all, even if several processes write them. A document carries a digest; a damaged one
counts as missing. Nothing depends on a document: if the cache cannot be written, its content is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neuronmm.kernels.durable import sync_tree


def cache_folder() -> Path:
    """Return ``$NEURONMM_CACHE``, or ``~/.cache/neuronmm`` if it is not set."""
    return Path(os.environ.get("NEURONMM_CACHE") or Path.home() / ".cache" / "neuronmm")


def read(name: str) -> Any:
    """Return the document ``name``, a path below the folder, or None if it is missing or damaged."""
    try:
        stored = json.loads((cache_folder() / name).read_text(encoding="utf-8"))
        return stored["document"] if stored["sha256"] == digest(stored["document"]) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write(name: str, document: Any) -> None:
    """Store ``document`` (JSON types) under ``name`` if the folder can be written."""
    path = cache_folder() / name
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=path.stem, dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"document": document, "sha256": digest(document)}, file)
            os.replace(partial, path)
        except OSError:
            os.unlink(partial)


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Pass a temporary folder to ``fill`` and rename the result to ``folder``.

    Raises:
        OSError: the folder cannot be written, and no other process has created it in the meantime.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        fill(partial)
        sync_tree(partial)
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def digest(document: Any) -> str:
    """Return the SHA-256 of a document, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
