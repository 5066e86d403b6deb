"""What is kept between processes: the folder for it, and small JSON documents there.

A document appears whole or not at all, whoever else writes it at the same time, and carries a digest; one that is
damaged counts as missing. Nothing depends on a document: where the folder cannot be written, all is computed anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


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


def digest(document: Any) -> str:
    """The SHA-256 of a document, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
