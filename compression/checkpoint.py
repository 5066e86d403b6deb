"""A finished checkpoint's folder: made of layers' parts, copied, and told from one that somebody else filled."""

from __future__ import annotations

import glob
import shutil
from pathlib import Path
from typing import Any

from neuronmm.compression import report
from neuronmm.compression.parts import write_tensors
from neuronmm.compression.reader import Reader
from neuronmm.models.documents import write_json
from neuronmm.models.errors import UserError
from neuronmm.models.load import weight_files
from neuronmm.models.output import stranger_in
from neuronmm.models.portable import make_portable

_SHARD_BYTES = 2_000_000_000
_INDEX = "model.safetensors.index.json"
_BESIDE = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja",
    "generation_config.json",
)  # fmt: skip


def check_ours(folder: Path) -> None:
    """Check that ``folder`` holds a checkpoint that :mod:`neuronmm.compression` wrote, and nothing else.

    Raises:
        UserError: it has not the report of one, or holds a file that this does not name.
    """
    try:
        files = report.read(folder)["files"]
    except (UserError, LookupError):
        raise UserError(
            f"{folder}: has no {report.REPORT} that names its files (older versions wrote none that does); --force "
            "replaces only a checkpoint that neuronmm wrote; move that folder away, or give another"
        ) from None
    names = map(str, files) if isinstance(files, list) else ()
    stranger = stranger_in(folder, [glob.escape(name) for name in names if "/" not in name])  # no patterns, no folders
    if stranger is not None:
        raise UserError(f"{folder}: holds {stranger.name}, which neuronmm did not write; move that away first")


def assemble(final: Path, source: Reader, others: list[str], parts: list[Path], config: dict[str, Any]) -> None:
    """Make a loadable checkpoint of the layers' parts.

    Args:
        final: the folder to make it in.
        source: the dense checkpoint; its tokenizer and generation files are copied.
        others: the tensors outside the decoder layers, copied as they are.
        parts: a safetensors file for each layer, in order.
        config: the new config.json.
    """
    write_json(final / "config.json", config)
    _write_shards(final, source, others, parts)
    _complete(source.folder, final)


def _write_shards(final: Path, source: Reader, others: list[str], parts: list[Path]) -> None:
    """Safetensors shards of at most 2 GB with an index, or one file where everything fits."""
    readers = {name: source for name in others}
    for file in parts:
        part = Reader.of_file(file)
        readers.update(dict.fromkeys(part.names, part))
    shards: list[list[str]] = [[]]
    sizes = [0]
    for name, reader in readers.items():
        size = reader.nbytes(name)
        if shards[-1] and sizes[-1] + size > _SHARD_BYTES:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += size
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        single = len(shards) == 1
        shard = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(final / shard, {name: readers[name][name] for name in names})
        shutil.copymode(final / "config.json", final / shard)  # safetensors makes files only the owner can read
        where.update(dict.fromkeys(names, shard))
        for reader in {id(readers[name]): readers[name] for name in names}.values():
            reader.close()
    if len(shards) > 1:
        write_json(final / _INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": where})


def copy_checkpoint(source: Path, final: Path) -> None:
    """Copy a checkpoint's weights, config.json, tokenizer and generation files, and nothing else that lies there."""
    for file in {*weight_files(source).values(), *source.glob(_INDEX)}:
        shutil.copyfile(file, final / file.name)
    shutil.copyfile(source / "config.json", final / "config.json")
    _complete(source, final)


def _complete(source: Path, final: Path) -> None:
    """Give a checkpoint with weights and config.json what else it has from ``source``, readable by old and new."""
    for pattern in _BESIDE:
        for file in source.glob(pattern):
            shutil.copyfile(file, final / file.name)
    make_portable(final)
