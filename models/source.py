"""Resolve a model's name - a Hugging Face folder, a GGUF file or a hub id - to a folder.

Only safetensors weights are accepted, because a pickle can run code. A GGUF file is unpacked once into a cache folder
(``$NEURONMM_CACHE``, else ``~/.cache/neuronmm``) as an ordinary bf16 checkpoint, tokenizer included.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neuronmm.kernels.cache import cache_folder, write_folder
from neuronmm.models.documents import read_object
from neuronmm.models.errors import UserError
from neuronmm.models.progress import Progress, no_progress

_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_GGUF_MAGIC = b"GGUF"
TEMPLATES = "additional_chat_templates"
"""A folder of further chat templates, which transformers reads, too."""

_CACHE_FORMAT = 5


def resolve(model: str | Path, progress: Progress = no_progress) -> Path:
    """Return the folder with the config.json, the safetensors and the tokenizer of ``model``.

    Args:
        model: a folder, a ``.gguf`` file, or a hub id such as ``meta-llama/Llama-3.2-1B`` (needs network access).
        progress: is told how much of a GGUF file is unpacked.

    Raises:
        UserError: the model does not exist, its weights are not safetensors, or another file of it is malformed.
    """
    path = expanded(model)
    if is_gguf(path):
        return _unpack_gguf(path.resolve(), progress)
    folder = config_folder(path if path.is_dir() else _download(str(model), _HUB_FILES))
    if not list(folder.glob("*.safetensors")):
        pickles = [file.name for file in folder.glob("*.bin")]
        hint = f"only {pickles[0]}, a pickle; convert it to safetensors first" if pickles else "the weights are missing"
        raise UserError(f"{folder}: no .safetensors file there ({hint})")
    _check_side_files(folder)
    return folder


def folder_at_hand(model: str | Path) -> Path | None:
    """Return the folder that :func:`resolve` will return if that is on this machine already; nothing in it is checked.

    Of a hub id it is the newest of the hub's cache, which may have been replaced on the hub.

    Raises:
        UserError: as :func:`is_gguf`.
    """
    path = expanded(model)
    if is_gguf(path):
        folder = _unpacked(path.resolve())
        return folder if folder.is_dir() else None
    if path.is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(str(model), "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def config_folder(model: str | Path) -> Path:
    """Return the folder with the config.json of ``model``, whose weights need not be there.

    Args:
        model: a folder, its config.json, or a hub id, from which nothing else is downloaded.

    Raises:
        UserError: the model or its config.json does not exist, or the folder holds an adapter.
    """
    path = expanded(model)
    if path.name == "config.json" and path.is_file():
        return path.parent
    folder = path if path.is_dir() else _download(str(model), ["config.json"])
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder}: holds an adapter (adapter_config.json), not a model; merge it into its model")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json there; give the folder of a Hugging Face checkpoint")
    return folder


def is_gguf(path: Path) -> bool:
    """Return whether ``path`` is a GGUF file; False if it is no file.

    Raises:
        UserError: it is a file of another kind.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        if file.read(4) != _GGUF_MAGIC:
            raise UserError(f"{path}: neither a model folder nor a GGUF file")
    return True


def expanded(path: str | Path) -> Path:
    """Return ``path`` with a leading ``~`` expanded to the home folder.

    Raises:
        UserError: the path is empty, or names a user that this machine does not have.
    """
    if path == "":  # Path takes it for the current directory
        raise UserError("an empty name, perhaps of a variable that is not set; give the name of a file or a folder")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: this machine has no such user; write ./~... for a folder of that name") from None


def short_name(model: str | Path) -> str:
    """Return the last part of a model's path or hub id; that of the folder that a path such as ``.`` leads to."""
    return os.path.basename(os.path.abspath(expanded(model)))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of the config.json of ``folder``.

    Raises:
        UserError: the file is not valid JSON.
    """
    return read_object(folder / "config.json")


def difference(settings: Mapping[str, Any], compressed: Mapping[str, Any]) -> str | None:
    """Return in what the model of one config.json cannot be the dense model of the other; None if it can."""
    for key in ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if settings.get(key) != compressed.get(key):
            return f"{key} {settings.get(key)}, not {compressed.get(key)}"
    return None


def is_compressed(folder: Path) -> bool:
    """Return whether the model of ``folder`` is compressed or quantised, by whatever tool; ``null`` says it is not.

    Raises:
        UserError: its config.json is not valid JSON.
    """
    return read_config(folder).get("quantization_config") is not None


def _check_side_files(folder: Path) -> None:
    """Check the files that are read or copied along with the weights.

    A symlink would let an untrusted checkpoint name any file of this machine. Only the links of the hub's cache, into
    the folder ``blobs`` two levels up, may leave the folder.

    Raises:
        UserError: a symlink leads out of the checkpoint, or a JSON file is malformed.
    """
    home = folder.resolve()
    allowed = (home, home.parents[1] / "blobs" if home.parent.name == "snapshots" else home)
    templates = folder / TEMPLATES
    for file in (*sorted(folder.iterdir()), *sorted(templates.glob("*"))):
        leaves = file.is_symlink() and not any(Path(os.path.realpath(file)).is_relative_to(root) for root in allowed)
        if leaves and (file.is_file() or file == templates):
            kind = "file" if file.is_file() else "folder"
            raise UserError(f"{file}: is a link to a {kind} outside the checkpoint; put the {kind} itself there")
    for name in ("tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            read_object(folder / name)


def _download(model: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UserError(f"{model}: no such file or folder")
    try:
        return Path(snapshot_download(model, allow_patterns=files))
    except HFValidationError:
        raise UserError(f"{model}: no such file or folder, and not a hub id") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{model}: no such folder, and the download from the hub failed ({reason})") from None


def _unpack_gguf(file: Path, progress: Progress) -> Path:
    """Dequantise ``file`` into a bf16 folder of the cache, which appears only when complete, and return the folder."""
    folder = _unpacked(file)
    if not folder.is_dir():
        from neuronmm.models.gguf_file import unpack

        write_folder(folder, lambda partial: unpack(file, partial, progress))
    return folder


def _unpacked(file: Path) -> Path:
    """Return the folder of the cache for a GGUF file."""
    stat = file.stat()
    key = hashlib.sha256(f"{_CACHE_FORMAT}:{file}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    return cache_folder() / f"{file.stem}-{key}"
