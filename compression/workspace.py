"""The folder ``OUT.partial`` in which a run works. Every file is saved atomically; OUT appears when it is complete."""

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
from neuronmm.compression.config import renamed
from neuronmm.compression.tensor_files import read_header, read_tensors, write_tensors
from neuronmm.kernels.durable import WRITING, sync, sync_tree
from neuronmm.models.documents import read_own, write_json
from neuronmm.models.errors import UserError
from neuronmm.models.output import Inputs, is_within, keep_apart, output_folder, stranger_in

RUN = "run.json"
"""The file with the settings of the run in a work folder."""

SEARCH = "search.json"
"""The file with what a finished search of the ratio measured."""

FINAL, _REPLACED, MOMENTS = "final", "replaced", "moments"
MEMBER = "process-{}"
"""The folder with the states of the rows that another process than the first has."""

_STATES = ("calibration", "gradient-*", "hidden-*", "inputs-*", "layer-*", "spectra-*", "recovery-*", "rounded-*",
            "rounding-*")  # fmt: skip
_UNFINISHED = (f"*{WRITING}", f"*{WRITING}/")
_FOLDERS = tuple(f"{name}/" for name in (FINAL, _REPLACED, MOMENTS, MEMBER.format("*")))
_KNOWN = (MARK, RUN, SEARCH, *_FOLDERS, *(f"{state}.safetensors" for state in _STATES), *_UNFINISHED)
"""The names of all files and folders that a run writes into its folder."""


_OF_THE_PLAN = ("budget", "ratio")
"""The settings on which nothing depends that is kept before the ranks are planned."""


class Workspace:
    """The files of one run, one per layer, and the checkpoint assembled from them.

    The constructor creates and locks the folder, so that no other run works for the same OUT. At the end of the
    ``with`` block the folder is unlocked, and removed if it holds nothing that a later run could resume.

    Args:
        out: the folder of the new checkpoint.
        inputs: what the run reads; see :meth:`protect`.
        resume: continue an interrupted run.
        force: replace OUT if it exists; discard an interrupted run unless it is resumed.

    Raises:
        UserError: OUT cannot be written, exists, or holds an input or files that neuronmm did not write; another run
            works there, or an interrupted one was not resumed.
    """

    def __init__(self, out: str | Path, inputs: Inputs, *, resume: bool, force: bool) -> None:
        self.out = output_folder(out)
        if is_within(Path.cwd(), self.out):
            raise UserError(f"{out}: is the current directory or one above it; give another folder to write")
        check_no_run_around(self.out)
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
        """Check that OUT and the work folder are separate from ``inputs``, which are files, folders or hub ids.

        Raises:
            UserError: one of the two is, contains or is inside an input.
        """
        for folder in (self.out, self.folder):
            keep_apart(folder, inputs)

    def begin(self, run: dict[str, Any]) -> None:
        """Start the run with the settings ``run``, or resume an interrupted one of the same settings.

        As long as no ranks are planned, a resumed run may have another ratio or budget. An interrupted run whose
        settings cannot be read is discarded.

        Raises:
            UserError: the run to resume has other settings.
        """
        before = read_own(self.folder / RUN) if self._resume else None
        if before is None:
            self._claim.clear()
            write_json(self.folder / RUN, run)
            return
        before = renamed(before, notice=False)
        planned = (self.folder / SEARCH).exists() or any(self.folder.glob("layer-*"))
        changed = [key for key in run if before.get(key) != run[key] and (planned or key not in _OF_THE_PLAN)]
        if changed:
            raise UserError(
                f"{self.folder}: was started with another {changed[0]} ({before.get(changed[0])!r}, now "
                f"{run[changed[0]]!r}); repeat that command with --resume, or --force starts over"
            )
        write_json(self.folder / RUN, run)

    @property
    def common(self) -> Path:
        """The work folder itself, in which all processes of the run read what the first one writes."""
        return self.folder

    @property
    def moments(self) -> Path:
        """The folder of the calibration store of this run alone."""
        return self.common / MOMENTS

    def save(self, name: str, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
        """Write ``name``.safetensors atomically."""
        write_tensors(self._file(name), tensors, metadata)

    def load(self, name: str, needed: Collection[str] = ()) -> dict[str, Tensor] | None:
        """Return the tensors of ``name``.safetensors; None if it is missing, damaged or lacks a ``needed`` one."""
        return read_tensors(self._file(name), needed)

    def tokens(self, make: Callable[[], Tensor]) -> Tensor:
        """Return the calibration tokens [rows, length] of the interrupted run, or else save and return ``make()``."""
        tensors = self.load("calibration", ["tokens"])
        if tensors is None:
            tensors = {"tokens": make()}
            self.save("calibration", tensors)
        return tensors["tokens"]

    def complete(self, names: Collection[str], needed: Collection[str]) -> bool:
        """Return whether the files of all ``names`` are complete and have the ``needed`` tensors."""
        return all(read_header(self._file(name), needed) is not None for name in names)

    def drop(self, name: str) -> None:
        """Remove ``name``.safetensors if it exists."""
        self._file(name).unlink(missing_ok=True)

    def latest(self, name: str, needed: Collection[str]) -> tuple[int, dict[str, Tensor]]:
        """Return number and tensors of the last complete ``name``-NNNNN.safetensors; 0 and none if there is none."""
        for file in sorted(self.folder.glob(f"{name}-*.safetensors"), reverse=True):
            tensors = read_tensors(file, needed)
            if tensors is not None:
                return int(file.stem.rpartition("-")[2]), tensors
        return 0, {}

    def layers_done(self, layers: int, streams: Collection[str]) -> int:
        """Return how many of the ``layers``, from the first on, need not run again.

        Their files are complete, and so is the file with the hidden states ``streams`` that the next layer reads.
        """
        count = 0
        while count < layers and _facts(self.part(count)) is not None:
            count += 1
        if count == layers or not streams:
            return count
        while count and read_header(self._file(f"hidden-{count:05d}"), streams) is None:
            count -= 1
        return count

    def save_search(self, search: dict[str, Any]) -> None:
        """Write what a finished search of the ratio measured."""
        write_json(self.folder / SEARCH, search)

    def search(self) -> dict[str, Any] | None:
        """Return what the search of the interrupted run measured; None if it did not finish."""
        return read_own(self.folder / SEARCH)

    def save_layer(self, index: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write one finished layer and its facts for the report."""
        self.save(self.part(index).stem, tensors, {"facts": json.dumps(facts)})

    def layer_facts(self, layers: int) -> list[dict[str, Any]]:
        """Return the facts of each layer for the report, including those of an interrupted run."""
        return [_facts(self.part(index)) or {} for index in range(layers)]

    def part(self, index: int) -> Path:
        """Return the file of layer ``index``."""
        return self._file(f"layer-{index:05d}")

    def finish(self, fill: Callable[[Path], None]) -> None:
        """Let ``fill`` write the checkpoint into an empty folder, move this folder to OUT, and remove the work folder.

        An existing OUT is first moved into the work folder. A kill between the two moves leaves no OUT; the next run
        for this OUT moves the old one back.
        """
        final = self.folder / FINAL
        shutil.rmtree(final, ignore_errors=True)
        final.mkdir()
        fill(final)
        sync_tree(final)
        self._check_out()  # it may have been created or filled since the run began
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
        """Check that the work folder is missing, empty, or holds only files of a run."""
        if not os.path.lexists(self.folder):
            return
        advice = "move that away, or give another -o"
        if self.folder.is_symlink() or not self.folder.is_dir():
            raise UserError(f"{self.folder}: is not a folder, and this run needs one of that name; {advice}")
        entries = list(self.folder.iterdir())
        if entries and self.folder / MARK not in entries:
            raise UserError(f"{self.folder}: was not made by neuronmm, and this run needs that name; {advice}")
        stranger = stranger_in(self.folder, _KNOWN)
        if stranger is not None:
            raise UserError(f"{self.folder}: holds {stranger.name}, which neuronmm did not write; {advice}")

    def _check_out(self) -> None:
        """Check that OUT is missing, empty, or may be replaced."""
        if not os.path.lexists(self.out):
            return
        if os.path.ismount(self.out):
            raise UserError(f"{self.out}: is a mount point and cannot be replaced; give a folder inside it")
        empty = self.out.is_dir() and not any(self.out.iterdir())
        if not self._force and not empty:
            raise UserError(f"{self.out}: exists already; give another -o, or --force to replace it")
        if not empty:
            check_ours(self.out)
        if not os.access(self.out, os.W_OK | os.X_OK):
            raise UserError(f"{self.out}: is read-only and cannot be replaced; give another -o")

    def _bring_back(self) -> None:
        """Complete or undo a replacement that was killed between the two moves of :meth:`finish`, or after them."""
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
        elif (self.folder / FINAL).exists():
            raise UserError(f"{self.out}: was created while its previous content waits in {old}; move one of them away")
        else:
            shutil.rmtree(old)

    def _holds_work(self) -> bool:
        """Return whether the folder holds anything that a later run could resume."""
        return (self.folder / _REPLACED).exists() or any(self.folder.glob("*.safetensors"))

    def _leave(self) -> None:
        if self._holds_work():
            self._claim.release()
        else:
            self._claim.remove()


def work_folder(out: str | Path) -> Path:
    """Return the folder in which a run for ``out`` works."""
    folder = output_folder(out)
    return folder.with_name(f"{folder.name}.partial")


def _facts(part: Path) -> dict[str, Any] | None:
    """Return the facts in a layer's file; None if the file is missing or damaged."""
    try:
        facts = json.loads((read_header(part) or {})["facts"])
    except (ValueError, LookupError):
        return None
    return facts if isinstance(facts, dict) else None


def check_no_run_around(out: Path) -> None:
    """Check that the absolute path ``out`` is not in a run's work folder; a sweep's own folder has another name.

    Raises:
        UserError: it is.
    """
    for folder in out.parents:
        if folder.suffix == ".partial" and (folder / MARK).is_file():
            raise UserError(f"{out}: is inside {folder}, the work folder of another run; give another folder to write")
