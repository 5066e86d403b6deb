"""The folder ``OUT.partial`` a run works in: every step lands in it atomically, and OUT appears only when complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from neuronmm.compression.reader import Reader
from neuronmm.models.errors import UserError
from neuronmm.models.load import weight_files
from neuronmm.models.portable import make_portable, write_json

_SHARD_BYTES = 2_000_000_000
_BESIDE = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja",
    "generation_config.json",
)  # fmt: skip


class Workspace:
    """Parts of one run, one file a layer, and the finished checkpoint made of them.

    Raises:
        UserError: OUT exists, an interrupted run is in the way, or the run to resume was started otherwise.
    """

    def __init__(self, out: Path, run: dict[str, Any], resume: bool, force: bool) -> None:
        self.out, self._run = out, run
        self.folder = out.with_name(out.name + ".partial")
        if out.exists() and not force:
            raise UserError(f"{out}: exists already; give another -o, or --force to replace it")
        if self.folder.exists() and resume:
            self._check(self.folder / "run.json", run)
            return
        if self.folder.exists() and not force:
            raise UserError(f"{self.folder}: an interrupted run is there; --resume continues it, --force starts over")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _check(self, plan: Path, run: dict[str, Any]) -> None:
        try:
            before = json.loads(plan.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            raise UserError(
                f"{self.folder}: cannot be resumed ({plan.name} is unreadable); --force starts over"
            ) from None
        changed = [key for key in run if before.get(key) != run[key]]
        if changed:
            raise UserError(
                f"{self.folder}: was started with another {changed[0]} ({before.get(changed[0])!r}, now "
                f"{run[changed[0]]!r}); repeat that command with --resume, or --force starts over"
            )

    def save(self, name: str, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
        """Write ``name``.safetensors; it exists complete or not at all. The first one makes the folder."""
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            write_json(self.folder / "run.json", self._run)
        place_tensors(self.folder / f"{name}.safetensors", tensors, metadata)

    def load(self, name: str) -> dict[str, Tensor] | None:
        """The tensors of ``name``.safetensors, or None if it was not written."""
        path = self.folder / f"{name}.safetensors"
        return load_file(path) if path.is_file() else None

    def tokens(self, make: Callable[[], Tensor]) -> Tensor:
        """The calibration tokens [rows, length]: an interrupted run's, or what ``make`` gives, which is kept."""
        kept = self.load("calibration")
        if kept is None:
            kept = {"tokens": make()}
            self.save("calibration", kept)
        return kept["tokens"]

    def drop(self, name: str) -> None:
        """Remove ``name``.safetensors if it is there."""
        (self.folder / f"{name}.safetensors").unlink(missing_ok=True)

    def latest(self, name: str) -> int:
        """The number of the last ``name``-NNNNN.safetensors that was written, 0 if there is none."""
        numbers = [int(path.stem.rpartition("-")[2]) for path in self.folder.glob(f"{name}-*.safetensors")]
        return max(numbers, default=0)

    def layers_done(self) -> int:
        """How many layers, from the first on, are complete."""
        count = 0
        while self._part(count).is_file():
            count += 1
        return count

    def save_layer(self, index: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write one finished layer, and what the report has to say of it."""
        self.save(self._part(index).stem, tensors, {"facts": json.dumps(facts)})

    def layer_facts(self, layers: int) -> list[dict[str, Any]]:
        """What the report has to say of each layer, those of an interrupted run included."""
        facts = []
        for index in range(layers):
            with safe_open(self._part(index), framework="pt") as part:
                facts.append(json.loads(part.metadata()["facts"]))
        return facts

    def _part(self, index: int) -> Path:
        return self.folder / f"layer-{index:05d}.safetensors"

    def finish(self, fill: Callable[[Path], None]) -> None:
        """Let ``fill`` make the checkpoint in an empty folder, move that to OUT, and remove what led to it."""
        final = self.folder / "final"
        shutil.rmtree(final, ignore_errors=True)
        final.mkdir()
        fill(final)
        old = self.out.with_name(self.out.name + ".replaced")
        if self.out.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self.out, old)
        os.replace(final, self.out)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(self.folder)

    def assemble(self, final: Path, source: Reader, others: list[str], layers: int, config: dict[str, Any]) -> None:
        """Make a loadable checkpoint of the layers' parts.

        Args:
            final: the folder to make it in.
            source: the dense checkpoint; its tokenizer and generation files are copied.
            others: the tensors outside the decoder layers, copied as they are.
            layers: number of layer parts.
            config: the new config.json.
        """
        write_json(final / "config.json", config)
        self._write_shards(final, source, others, layers)
        _complete(source.folder, final)

    def _write_shards(self, final: Path, source: Reader, others: list[str], layers: int) -> None:
        """Safetensors shards of at most 2 GB with an index, or one file where everything fits."""
        readers = {name: source for name in others}
        for index in range(layers):
            part = Reader.of_file(self._part(index))
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
            file = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_tensors(final / file, {name: readers[name][name] for name in names})
            shutil.copymode(final / "config.json", final / file)  # safetensors makes files only the owner can read
            where.update(dict.fromkeys(names, file))
            for reader in {id(readers[name]): readers[name] for name in names}.values():
                reader.close()
        if len(shards) > 1:
            index_content = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
            write_json(final / "model.safetensors.index.json", index_content)


def copy_checkpoint(source: Path, final: Path) -> None:
    """Copy a checkpoint's weights, config.json, tokenizer and generation files, and nothing else that lies there."""
    for file in {*weight_files(source).values(), *source.glob("model.safetensors.index.json")}:
        shutil.copyfile(file, final / file.name)
    shutil.copyfile(source / "config.json", final / "config.json")
    _complete(source, final)


def _complete(source: Path, final: Path) -> None:
    """Give a checkpoint with weights and config.json what else it has from ``source``, readable by old and new."""
    for pattern in _BESIDE:
        for file in source.glob(pattern):
            shutil.copyfile(file, final / file.name)
    make_portable(final)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file.

    Raises:
        UserError: the disk is full or refuses the file.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    except (SafetensorError, OSError) as error:
        path.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error}); free some disk space and --resume") from None


def place_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file that exists complete or not at all, as :func:`write_tensors` does."""
    partial = path.with_suffix(".writing")
    write_tensors(partial, tensors, metadata)
    os.replace(partial, path)  # a crash before this line leaves the old state, after it the new one


def replace_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Replace some tensors of a checkpoint, as :func:`rewrite_shards` does.

    Raises:
        UserError: the disk is full or refuses a file; the old shards are then untouched.
    """
    files = weight_files(folder)
    rewrite_shards(
        {files[name] for name in tensors}, lambda held: {name: tensors.get(name, old) for name, old in held.items()}
    )


def rewrite_shards(files: Collection[Path], change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Give shards what ``change`` makes of their tensors: new ones are written beside the old first, then take over.

    Raises:
        UserError: the disk is full or refuses a file; the old shards are then untouched.
    """
    ready: dict[Path, Path] = {}
    try:
        for file in sorted(files):
            ready[file] = file.with_suffix(".writing")
            write_tensors(ready[file], change(load_file(file)))
            shutil.copymode(file, ready[file])
        for file, new in ready.items():
            os.replace(new, file)
    finally:
        for new in ready.values():
            with suppress(FileNotFoundError):
                new.unlink()
