"""Safetensors files that are complete or count as missing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from neuronmm.kernels.durable import WRITING, sync
from neuronmm.models.contents import weight_files
from neuronmm.models.errors import UserError

_DAMAGED = (SafetensorError, OSError, ValueError)
"""The errors of reading a file that is missing, empty or truncated."""


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically; it is on the disk when this returns.

    Raises:
        UserError: the disk is full or refuses the file.
    """
    # safetensors 0.8 writes a file of a random name first; a kill leaves that one in a folder whose name is known
    folder = path.with_name(path.name + WRITING)
    new = folder / path.name
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save_file(tensors, new, metadata={"format": "pt", **(metadata or {})})
        new.chmod(folder.stat().st_mode & 0o666)  # safetensors lets nobody but the owner read the file
        sync(new)
        os.replace(new, path)
        sync(path.parent)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be written ({error}); {_advice(error, path.parent)} and --resume") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _advice(error: Exception, folder: Path) -> str:
    """Return what to do about the ``error`` of writing to ``folder``; safetensors has its number in the text alone."""
    for advice, numbers in (
        ("free some disk space", (errno.ENOSPC, errno.EDQUOT)),
        (f"make {folder} writable", (errno.EACCES, errno.EPERM, errno.EROFS)),
    ):
        if any(os.strerror(number) in str(error) for number in numbers):
            return advice
    return "remove the cause"


def read_tensors(path: Path, names: Collection[str] = ()) -> dict[str, Tensor] | None:
    """Return the tensors of a safetensors file; None if it is missing or damaged, or lacks one of ``names``."""
    try:
        tensors = load_file(path)
    except _DAMAGED:
        return None
    return tensors if tensors.keys() >= set(names) else None


def read_header(path: Path, names: Collection[str] = ()) -> dict[str, str] | None:
    """Return the metadata of a safetensors file; None where :func:`read_tensors` returns None. No tensor is read."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}) if set(file.keys()) >= set(names) else None
    except _DAMAGED:
        return None


def replace_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Replace some tensors of a checkpoint, as :func:`rewrite_shards` does.

    Raises:
        UserError: the disk is full or refuses a file; the old shards are then untouched.
    """
    files = weight_files(folder)
    rewrite_shards(
        {files[name] for name in tensors}, lambda shard: {name: tensors.get(name, old) for name, old in shard.items()}
    )


def rewrite_shards(files: Collection[Path], change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace the tensors of each shard by ``change(tensors)``. All new shards are written before the first replaces
    an old one.

    Raises:
        UserError: the disk is full or refuses a file; the old shards are then untouched.
    """
    ready: dict[Path, Path] = {}
    try:
        for file in sorted(files):
            ready[file] = file.with_name(file.name + WRITING)
            write_tensors(ready[file], change(load_file(file)))
            shutil.copymode(file, ready[file])
        for file, new in ready.items():
            os.replace(new, file)
    finally:
        for new in ready.values():
            with suppress(FileNotFoundError):
                new.unlink()
