"""The folder ``OUT.partial`` a run works in: every step lands in it atomically, and OUT appears only when complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from neuronmm.compression.checkpoint import check_ours
from neuronmm.compression.claim import MARK, Claim
from neuronmm.compression.parts import place_tensors, read_header, read_tensors
from neuronmm.kernels.durable import WRITING, sync, sync_tree
from neuronmm.models.documents import read_own, write_json
from neuronmm.models.errors import UserError
from neuronmm.models.output import Inputs, is_within, keep_apart, output_folder, stranger_in

RUN = "run.json"
"""What the run in a work folder was asked for."""

_FINAL, _REPLACED = "final", "replaced"
_PARTS = ("calibration", "hidden-*", "layer-*", "spectra-*", "recovery-*")
_KNOWN = (MARK, RUN, f"{_FINAL}/", f"{_REPLACED}/", *(f"{part}.safetensors" for part in _PARTS), f"*{WRITING}")
"""All that a run writes into its folder."""


class Workspace:
    """Parts of one run, one file a layer, and the finished checkpoint made of them.

    The folder is made and locked at once: no other run works for the same OUT. Left as a context it is unlocked, and
    removed where nothing is in it that a later run could go on from.

    Args:
        out: the checkpoint's folder that is to be written.
        inputs: what the run reads; see :meth:`protect`.
        resume: go on with the work of an interrupted run.
        force: OUT may exist and is then replaced; the work of an interrupted run is dropped unless it is resumed.

    Raises:
        UserError: OUT cannot be written, holds what the run reads or what neuronmm did not write, or exists; another
            run is at work there, or an interrupted one is in the way.
    """

    def __init__(self, out: str | Path, inputs: Inputs, *, resume: bool, force: bool) -> None:
        self.out = output_folder(out)
        if is_within(Path.cwd(), self.out):
            raise UserError(f"{out}: is the current directory or one above it; give a folder of its own to write")
        self.folder = work_folder(self.out)
        self._resume, self._force = resume, force
        self.protect(*inputs)
        self._check_folder()
        self._claim = Claim(self.folder)
        self._undo = ExitStack()
        self._undo.callback(self._leave)
        try:
            self._bring_back()
            self._check_out()
            if self._holds_work() and not resume and not force:
                raise UserError(
                    f"{self.folder}: an interrupted run is there; --resume continues it, --force starts over"
                )
        except BaseException:
            self._undo.close()
            raise

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def protect(self, *inputs: str | Path | None) -> None:
        """Check that the run will not write over, around or inside ``inputs``, which are files, folders or hub ids.

        Raises:
            UserError: it would.
        """
        for folder in (self.out, self.folder):
            keep_apart(folder, inputs)

    def begin(self, run: dict[str, Any]) -> None:
        """Start the run that ``run`` describes, or go on with an interrupted one of the same description.

        Work whose description cannot be read counts as not done.

        Raises:
            UserError: the run to resume was started otherwise.
        """
        before = read_own(self.folder / RUN) if self._resume else None
        if before is None:
            self._claim.clear()
            write_json(self.folder / RUN, run)
            return
        changed = [key for key in run if before.get(key) != run[key]]
        if changed:
            raise UserError(
                f"{self.folder}: was started with another {changed[0]} ({before.get(changed[0])!r}, now "
                f"{run[changed[0]]!r}); repeat that command with --resume, or --force starts over"
            )

    def save(self, name: str, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
        """Write ``name``.safetensors; it exists complete or not at all."""
        place_tensors(self._file(name), tensors, metadata)

    def load(self, name: str, needed: Collection[str] = ()) -> dict[str, Tensor] | None:
        """The tensors of ``name``.safetensors, or None if it is missing, damaged or lacks a ``needed`` one."""
        return read_tensors(self._file(name), needed)

    def tokens(self, make: Callable[[], Tensor]) -> Tensor:
        """The calibration tokens [rows, length]: an interrupted run's, or what ``make`` gives, which is kept."""
        kept = self.load("calibration", ["tokens"])
        if kept is None:
            kept = {"tokens": make()}
            self.save("calibration", kept)
        return kept["tokens"]

    def drop(self, name: str) -> None:
        """Remove ``name``.safetensors if it is there."""
        self._file(name).unlink(missing_ok=True)

    def latest(self, name: str, needed: Collection[str]) -> tuple[int, dict[str, Tensor]]:
        """The number and the tensors of the last whole ``name``-NNNNN.safetensors; 0 and none if there is none."""
        for file in sorted(self.folder.glob(f"{name}-*.safetensors"), reverse=True):
            tensors = read_tensors(file, needed)
            if tensors is not None:
                return int(file.stem.rpartition("-")[2]), tensors
        return 0, {}

    def layers_done(self, layers: int, streams: Collection[str]) -> int:
        """How many of the ``layers``, from the first on, need not be run again.

        They are whole, and so are the hidden states ``streams`` that the layer after them reads. Where those are not,
        the layers before have to run to make them.
        """
        count = 0
        while count < layers and _facts(self.part(count)) is not None:
            count += 1
        if count == layers or not streams:
            return count
        while count and read_header(self._file(f"hidden-{count:05d}"), streams) is None:
            count -= 1
        return count

    def save_layer(self, index: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write one finished layer, and what the report has to say of it."""
        self.save(self.part(index).stem, tensors, {"facts": json.dumps(facts)})

    def layer_facts(self, layers: int) -> list[dict[str, Any]]:
        """What the report has to say of each layer, those of an interrupted run included."""
        return [_facts(self.part(index)) or {} for index in range(layers)]

    def part(self, index: int) -> Path:
        """The file of layer ``index``."""
        return self._file(f"layer-{index:05d}")

    def finish(self, fill: Callable[[Path], None]) -> None:
        """Let ``fill`` make the checkpoint in an empty folder, move that to OUT, and remove what led to it.

        An OUT that is to be replaced is moved into the work folder first. A kill between the two moves leaves no OUT;
        the next run for this OUT moves the old one back.
        """
        final = self.folder / _FINAL
        shutil.rmtree(final, ignore_errors=True)
        final.mkdir()
        fill(final)
        sync_tree(final)
        self._check_out()  # it may have been made or filled since the run began
        if self.out.exists():
            os.replace(self.out, self.folder / _REPLACED)
        os.replace(final, self.out)
        sync(self.out.parent)
        sync(self.folder)
        self._undo.pop_all()
        self._claim.remove()

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _check_folder(self) -> None:
        """Check that the work folder is missing, empty, or one that a run made and no one else wrote to."""
        if not os.path.lexists(self.folder):
            return
        move = "move that away, or give another -o"
        if self.folder.is_symlink() or not self.folder.is_dir():
            raise UserError(f"{self.folder}: is no folder, and this run needs one of that name; {move}")
        entries = list(self.folder.iterdir())
        if entries and self.folder / MARK not in entries:
            raise UserError(f"{self.folder}: was not made by neuronmm, and this run needs that name; {move}")
        stranger = stranger_in(self.folder, _KNOWN)
        if stranger is not None:
            raise UserError(f"{self.folder}: holds {stranger.name}, which neuronmm did not write; {move}")

    def _check_out(self) -> None:
        """Check that OUT is missing or empty, or may be replaced."""
        if not os.path.lexists(self.out):
            return
        empty = self.out.is_dir() and not any(self.out.iterdir())
        if not self._force and not empty:
            raise UserError(f"{self.out}: exists already; give another -o, or --force to replace it")
        if not empty:
            check_ours(self.out)
        if not os.access(self.out, os.W_OK | os.X_OK):
            raise UserError(f"{self.out}: is read-only and cannot be replaced; give another -o")

    def _bring_back(self) -> None:
        """End what a kill interrupted between the two moves of :meth:`finish`, or after them."""
        old = self.folder / _REPLACED
        if not old.exists():
            return
        if not self.out.exists():
            os.replace(old, self.out)
            sync(self.out.parent)
            if not self._force:
                raise UserError(
                    f"{self.out}: was interrupted while it was replaced and is now back as it was; "
                    "--force --resume ends the replacement"
                )
        elif (self.folder / _FINAL).exists():
            raise UserError(f"{self.out}: was made while its former content waits in {old}; move one of them away")
        else:
            shutil.rmtree(old)

    def _holds_work(self) -> bool:
        """Whether there is anything in the folder that a later run could go on from."""
        return (self.folder / _REPLACED).exists() or any(self.folder.glob("*.safetensors"))

    def _leave(self) -> None:
        if self._holds_work():
            self._claim.release()
        else:
            self._claim.remove()


def work_folder(out: str | Path) -> Path:
    """The folder in which a run for ``out`` works."""
    folder = output_folder(out)
    return folder.with_name(f"{folder.name}.partial")


def _facts(part: Path) -> dict[str, Any] | None:
    """What a layer's file says of the layer; None if the file is missing or damaged."""
    try:
        facts = json.loads((read_header(part) or {})["facts"])
    except (ValueError, LookupError):
        return None
    return facts if isinstance(facts, dict) else None
