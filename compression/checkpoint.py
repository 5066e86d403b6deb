"""The folder of a finished checkpoint: assembled from the files of its layers, copied, or with factors of few bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from neuronmm.compression import report
from neuronmm.compression.reader import Reader
from neuronmm.compression.rounding import ROUND, round_coefficients
from neuronmm.compression.tensor_files import rewrite_shards, write_tensors
from neuronmm.kernels import Form, Fp8, Int8
from neuronmm.models.contents import weight_files
from neuronmm.models.documents import write_json
from neuronmm.models.errors import UserError
from neuronmm.models.lowrank import FACTORS
from neuronmm.models.portable import make_portable
from neuronmm.models.source import TEMPLATES
from neuronmm.models.spec import CompressionSpec

_SHARD_BYTES = 2_000_000_000
_INDEX = "model.safetensors.index.json"
_BESIDE = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja",
    "generation_config.json",
)  # fmt: skip


def check_ours(folder: Path) -> None:
    """Check that ``folder`` holds a checkpoint that :mod:`neuronmm.compression` wrote, and nothing else.

    Raises:
        UserError: it has no report, or holds a file that the report does not name.
    """
    try:
        files = report.read(folder)["files"]
    except (UserError, LookupError):
        raise UserError(
            f"{folder}: has no {report.REPORT} that names its files (older versions wrote none that does); --force "
            "replaces only a checkpoint that neuronmm wrote; move that folder away, or give another"
        ) from None
    names = {Path(str(name)) for name in files} if isinstance(files, list) else set[Path]()
    ours = {each for name in names for each in (name, *name.parents)}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name not in ours:
            raise UserError(f"{folder}: holds {name}, which neuronmm did not write; move that away first")


def assemble(final: Path, source: Reader, others: list[str], layers: list[Path], config: dict[str, Any]) -> None:
    """Write a loadable checkpoint.

    Args:
        final: the empty folder to write it in.
        source: the dense checkpoint; its tokenizer and generation files are copied.
        others: the tensors outside the decoder layers, copied unchanged.
        layers: a safetensors file for each layer, in order.
        config: the new config.json.
    """
    write_json(final / "config.json", config)
    _write_shards(final, source, others, layers)
    _copy_beside(source.folder, final)


def _write_shards(final: Path, source: Reader, others: list[str], layers: list[Path]) -> None:
    """Write safetensors shards of at most 2 GB with an index, or a single file if everything fits."""
    readers = {name: source for name in others}
    for file in layers:
        layer = Reader.of_file(file)
        readers.update(dict.fromkeys(layer.names, layer))
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
        where.update(dict.fromkeys(names, shard))
        for reader in {id(readers[name]): readers[name] for name in names}.values():
            reader.close()
    if len(shards) > 1:
        write_json(final / _INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": where})


def copy_checkpoint(source: Path, final: Path) -> None:
    """Copy a checkpoint's weights, config.json, tokenizer and generation files, and no other files."""
    for file in {*weight_files(source).values(), *source.glob(_INDEX)}:
        shutil.copyfile(file, final / file.name)
    shutil.copyfile(source / "config.json", final / "config.json")
    _copy_beside(source, final)


def _copy_beside(source: Path, final: Path) -> None:
    """Copy the tokenizer and generation files, in a form that old and new transformers read."""
    for pattern in _BESIDE:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, final / file.name)
    for file in (source / TEMPLATES).glob("*.jinja"):
        (final / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(file, final / TEMPLATES / file.name)
    make_portable(final)


def round_factors(folder: Path, dtype: Literal["int8", "fp8"]) -> None:
    """Rewrite the factors of a compressed checkpoint in ``dtype`` with one float32 scale per row; update config.json.

    The coefficients of pivoted linears are fitted to their rounded pivots.

    Raises:
        UserError: the disk is full or refuses a file; the checkpoint is then untouched.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    spec = CompressionSpec.parse(config["quantization_config"], str(folder / "config.json"))
    original = Reader(folder)  # the pivots of a linear may be in another shard

    def quantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in [name for name in tensors if name.endswith(FACTORS)]:
            tensors[name], tensors[f"{name}_scale"] = _round_factor(name, tensors[name], spec, original, dtype)
        return tensors

    rewrite(folder, quantised, {"factors": dtype})


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], block: dict[str, Any]) -> None:
    """Replace the tensors of each shard of a compressed checkpoint by ``change(tensors)``.

    The entries of ``block`` replace those of ``quantization_config``.

    Raises:
        UserError: the disk is full or refuses a file; the checkpoint is then untouched.
    """
    files = weight_files(folder)
    where: dict[str, str] = {}
    total = 0

    def counted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        nonlocal total
        file = files[next(iter(tensors))].name
        changed = change(tensors)
        where.update(dict.fromkeys(changed, file))
        total += sum(tensor.nbytes for tensor in changed.values())
        return changed

    rewrite_shards(set(files.values()), counted)
    if len(set(where.values())) > 1:
        write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] |= block
    write_json(folder / "config.json", config)


def _round_factor(
    name: str, factor: Tensor, spec: CompressionSpec, original: Reader, dtype: Literal["int8", "fp8"]
) -> Int8 | Fp8:
    """Return the factor ``name`` in ``dtype``. ``original`` reads the factors before rounding."""
    linear, kind, _ = name.rsplit(".", 2)
    leader = spec.shared.get(linear, linear)
    form, rounded = spec.form_of(leader), ROUND[dtype]
    if (form, kind) not in ((Form.ROWS, "B"), (Form.COLUMNS, "A")):
        return rounded(factor)
    pivots = original[f"{leader}.{'A' if form is Form.ROWS else 'B'}.weight"]
    coefficients = round_coefficients(factor, pivots, form, rounded)
    original.close()  # pages of a mapped shard count as resident
    return coefficients
