"""What a run and its inputs are known by, so that resuming and shared calibration mix no two models or texts."""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from itertools import combinations
from pathlib import Path
from typing import Any

from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.reader import Reader
from neuronmm.compression.shipped_texts import SHIPPED, shipped_documents
from neuronmm.models import processes
from neuronmm.models.errors import UserError
from neuronmm.models.source import expanded
from neuronmm.version import VERSION

_PIECE = 1 << 20  # bytes


def of_model(checkpoint: Reader) -> dict[str, Any]:
    """Return the folder, the size and the last change of a checkpoint: a fine-tuned model has the same size."""
    changed = datetime.fromtimestamp(checkpoint.modified(), timezone.utc).isoformat()
    return {"model": str(checkpoint.folder), "bytes": checkpoint.total_bytes(), "last_change_of_model": changed}


def of_weights(checkpoint: Reader) -> str | None:
    """Return the digest of a checkpoint's weight files, which another model of its sizes does not share.

    None if a file cannot be read now.
    """
    digests = [of_file(file) for file in checkpoint.files]
    return None if None in digests else hashlib.sha256("".join(map(str, digests)).encode()).hexdigest()[:16]


def name_of_model(model: str | Path) -> str:
    """Return how a report names the dense model: by its path, from any folder, or by its hub id."""
    path = expanded(model)
    return str(path.absolute()) if path.exists() else str(model)


def of_run(device: str) -> dict[str, Any]:
    """Return what of the program and the machine an interrupted run must find again."""
    return {"version": VERSION, "device": device, "number of processes": processes.size()}


def of_texts(config: CompressionConfig) -> dict[str, Any]:
    """Return the digest of every text but the model's own; None for one that cannot be read, which is refused later.

    Raises:
        UserError: two files hold one text.
    """
    files = {text: of_file(Path(text)) for text in config.text_files}
    shipped = {text: _digest_of(shipped_documents(text)) for text in config.texts if text in SHIPPED}
    for one, other in combinations((name for name, digest in files.items() if digest is not None), 2):
        if files[one] == files[other]:
            raise UserError(f"calibration: {one} and {other} hold one text; name it once")
    return {"content_of_texts": {**files, **shipped}}


def _digest_of(documents: list[str]) -> str:
    return hashlib.sha256("".join(documents).encode()).hexdigest()[:16]


def of_file(file: Path) -> str | None:
    """Return the digest of a file's content; None if it cannot be read, or only once as a pipe."""
    if not file.is_file():
        return None
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE):
                digest.update(piece)
    except OSError:
        return None
    return digest.hexdigest()[:16]
