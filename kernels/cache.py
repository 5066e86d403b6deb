"""What is kept between processes: the place for it, small JSON documents there, and whole folders.

Both appear whole or not at all, whoever else writes them at the same time. A document carries a digest; one that is
damaged counts as missing. Nothing depends on a document: where the place cannot be written, all is computed anew.
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
    """``$NEURONMM_CACHE``, else ``~/.cache/neuronmm``."""
    return Path(os.environ.get("NEURONMM_CACHE") or Path.home() / ".cache" / "neuronmm")


def read(name: str) -> Any:
    """The document ``name``, a path below the folder; None if it is not there or damaged."""
    try:
        kept = json.loads((cache_folder() / name).read_text(encoding="utf-8"))
        return kept["document"] if kept["sha256"] == digest(kept["document"]) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write(name: str, document: Any) -> None:
    """Keep ``document`` (what JSON can hold) under ``name``, if the folder can be written."""
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
    """Keep what ``fill`` writes into the folder it is given as ``folder``.

    Raises:
        OSError: it cannot be written, and no other process has made ``folder`` meanwhile.
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
    """The SHA-256 of a document, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
