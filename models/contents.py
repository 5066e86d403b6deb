"""Read what a checkpoint folder contains from config.json and the headers of its shards, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic_core import from_json
from safetensors import SafetensorError, safe_open

from neuronmm.models.documents import read_object
from neuronmm.models.errors import UserError
from neuronmm.models.model_config import ModelConfig
from neuronmm.models.source import read_config
from neuronmm.models.spec import CompressionSpec
from neuronmm.models.tensors import EMBEDDING, HEAD, NORM, check_tensors, headers

_PIECE = 1 << 24  # bytes
_PLAIN_NAME = re.compile(r"[\w .-]{1,200}\.safetensors", re.ASCII)


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint folder whose config.json and shards agree.

    ``settings`` is all of config.json and ``config`` the part that this project reads. ``spec`` is the
    ``quantization_config``, None for a dense checkpoint. ``files`` maps each tensor name to its shard.
    """

    settings: dict[str, Any]
    config: ModelConfig
    spec: CompressionSpec | None
    files: dict[str, Path]


def inspect(folder: Path) -> Contents:
    """Return the contents of a checkpoint folder from config.json and the shard headers.

    No weight is read, except for a stored head that config.json ties to the embedding.

    Raises:
        UserError: unsupported architecture, corrupt shard, or a config.json that disagrees with the weights.
    """
    where = str(folder / "config.json")
    settings = read_config(folder)
    config = ModelConfig.parse(settings, where)
    block = settings.get("quantization_config")
    spec = None if block is None else CompressionSpec.parse(block, where)
    files = weight_files(folder)
    check_tensors(folder, files, config, spec)
    if config.tie_word_embeddings and HEAD in files:
        _check_tied(folder, files)
    return Contents(settings, config, spec, files)


def chosen_dtype(folder: Path) -> str:
    """Return ``bf16`` or ``fp32`` by the dtype that config.json names, else by that of the final norm; fp16 is bf16.

    Raises:
        UserError: as :func:`inspect`.
    """
    config = read_config(folder)
    named = config.get("dtype") or config.get("torch_dtype")
    if not named:
        files = inspect(folder).files
        named = next(dtype for name, (_, dtype) in headers({NORM: files[NORM]}) if name == NORM)
    return "bf16" if str(named).removeprefix("torch.") in ("bfloat16", "float16", "BF16", "F16") else "fp32"


def _check_tied(folder: Path, files: dict[str, Path]) -> None:
    """Check that the stored head is the embedding. If it is not, some programs take the one and some the other.

    Raises:
        UserError: it is not.
    """
    with _bytes_of(HEAD, files) as head, _bytes_of(EMBEDDING, files) as embedding:
        if any(one != other for one, other in zip_longest(head, embedding)):
            raise UserError(
                f"{folder / 'config.json'}: ties the head to the embedding, but the stored {HEAD} differs from it; "
                "write tie_word_embeddings: false there, or remove that tensor"
            )


@contextmanager
def _bytes_of(name: str, files: dict[str, Path]) -> Iterator[Iterator[bytes]]:
    """Give the bytes of a stored tensor, piece by piece, without torch; numpy has no bf16."""
    with files[name].open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        begin, end = from_json(file.read(size))[name]["data_offsets"]
        file.seek(8 + size + begin)
        yield (file.read(min(_PIECE, end - at)) for at in range(begin, end, _PIECE))


def weight_files(folder: Path) -> dict[str, Path]:
    """Map each tensor name to its file. As in transformers, model.safetensors takes precedence over an index.

    Raises:
        UserError: the index is malformed or names a file that is missing or outside the folder, a file is corrupt, or
            two hold one tensor.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    names: dict[str, Path] = {}
    if index.is_file() and not single.is_file():
        entries = read_object(index).get("weight_map")
        if not isinstance(entries, dict) or not all(isinstance(file, str) for file in entries.values()):
            raise UserError(f"{index}: not a safetensors index; download the checkpoint again")
        for name, file in entries.items():
            if not _PLAIN_NAME.fullmatch(file):
                raise UserError(f"{index}: {file!r} is not the name of a .safetensors file in the folder; fix it")
            names[name] = folder / file
    files = [single] if single.is_file() else sorted(set(names.values()))
    if not files:
        raise UserError(f"{folder}: neither {single.name} nor {index.name} with its shards is there; download it again")
    stored: dict[str, Path] = {}
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: named in {index.name} but missing; download the checkpoint again")
        try:
            with safe_open(file, framework="np") as tensors:
                held = dict.fromkeys(tensors.keys(), file)
        except SafetensorError as error:
            raise UserError(f"{file}: corrupt shard ({error}); download or compress again") from None
        twice = next(iter(held.keys() & stored.keys()), None)
        if twice is not None:  # the copies may differ, and programs may differ in which they take
            raise UserError(f"{file}: holds {twice}, and so does {stored[twice].name}; remove the wrong one")
        stored |= held
    missing = [name for name in names if name not in stored]
    if missing:
        raise UserError(f"{folder}: tensor {missing[0]} is in the index but in no shard; download the checkpoint again")
    return stored
