"""The folder of a sweep: locked by one process, new or resumed, and never the folder of something else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from neuronmm.compression.claim import MARK, Claim
from neuronmm.compression.config import renamed
from neuronmm.compression.identity import of_file, of_model
from neuronmm.compression.reader import Reader
from neuronmm.compression.workspace import check_no_run_around
from neuronmm.kernels.durable import WRITING
from neuronmm.measure.sweep_config import SweepConfig
from neuronmm.models.documents import read_own, write_json
from neuronmm.models.errors import UserError
from neuronmm.models.output import stranger_in

RUN = "run.json"
"""The file with the settings of a sweep."""


@dataclass(frozen=True)
class SweepSettings:
    """The dense ``model``, what a sweep measures of every point, and the settings that all points share.

    ``contents`` identifies what the model and the files hold, by path: an edited file has the name of before.
    """

    model: str
    texts: dict[str, str]
    context: int | None
    limit: int | None
    tasks: dict[str, str]
    questions: int | None
    speed: bool
    base: dict[str, Any]
    contents: dict[str, Any]

    @classmethod
    def of(cls, config: SweepConfig, dense: Path) -> SweepSettings:
        """Return the settings of ``config`` for the model in the folder ``dense``."""
        files = [*config.text_files.values(), *config.task_files.values()]
        return cls(
            model=str(dense),
            texts={name: str(file) for name, file in config.text_files.items()},
            context=config.context,
            limit=config.limit,
            tasks={name: str(file) for name, file in config.task_files.items()},
            questions=config.questions,
            speed=config.speed,
            base=config.base.model_dump(exclude={"ratio", "method"}),
            contents={str(dense): of_model(Reader(dense)), **{str(file): of_file(Path(file)) for file in files}},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


def read_settings(out: Path) -> SweepSettings:
    """Return the settings of the sweep in ``out``.

    Raises:
        UserError: ``out`` is not the folder of a sweep.
    """
    document, names = read_own(out / RUN), {field.name for field in fields(SweepSettings)}
    if document is None or not names <= document.keys():
        raise UserError(f"{out}: is not the folder of a sweep ({RUN} is unreadable)")
    return SweepSettings(**{name: document[name] for name in names})


@contextmanager
def claimed(out: Path, resume: bool) -> Iterator[None]:
    """Lock the folder ``out`` for the duration of the block: a new folder, or with ``resume`` an earlier sweep's.

    Raises:
        UserError: another process works there, the folder exists without ``resume``, or it is not a sweep's.
    """
    _check(out, resume)
    claim = Claim(out)
    try:
        _check(out, resume)  # another sweep may have used the folder before this one had the lock
        yield
    finally:
        if claim.empty():
            claim.remove()
        else:
            claim.unmark()


def write_settings(out: Path, settings: SweepSettings) -> None:
    """Write ``settings`` to the folder of the sweep in ``out``.

    Raises:
        UserError: the sweep started with other settings, or the model or a file has changed since; a resumed sweep may
            only add measures.
    """
    run = json.loads(json.dumps(settings.to_json()))
    before = read_own(out / RUN) or run
    if isinstance(before.get("base"), dict):
        # A sweep of a version without the setting ``form`` has two factors, and one without ``weight_dtype`` floats.
        added = {"form": "two", "weight_dtype": "model"}
        before = {**before, "base": {**added, **renamed(before["base"], notice=False)}}
    texts = before.get("texts")
    known = {name: file for name, file in run["texts"].items() if isinstance(texts, dict) and name in texts}
    contents = before.get("contents", {})  # earlier versions did not note them
    for path, content in run["contents"].items():
        if contents.get(path, content) != content:
            raise UserError(f"{out}: {path} has changed since the sweep measured it; sweep it again with another -o")
    comparable = {**run, "texts": known}
    del comparable["contents"]
    if before.get("tasks") == {}:
        comparable.update(tasks={}, questions=before.get("questions"))
    if before.get("speed") is False:
        comparable.update(speed=False)
    for key, value in comparable.items():
        if before.get(key) != value:
            raise UserError(f"{out}: was started with another {key} ({before.get(key)!r}, now {run[key]!r})")
    if run != read_own(out / RUN):
        write_json(out / RUN, run)


def _check(out: Path, resume: bool) -> None:
    """Check that a sweep may start in ``out``, or with ``resume`` continue there.

    A sweep that was killed at once has left only its mark; another one may start there.
    """
    check_no_run_around(out)
    if not os.path.lexists(out):
        if out.suffix == ".partial":
            raise UserError(f"{out}: has the name of a work folder, in which no run may write; give another -o")
        return
    if (out / MARK).is_file() and stranger_in(out, (MARK, RUN + WRITING)) is None:
        return
    if not resume:
        raise UserError(f"{out}: exists already; --resume continues the sweep in it, or give another -o")
    if "texts" not in (read_own(out / RUN) or {}):  # other commands' work folders also have a run.json
        raise UserError(f"{out}: is not the folder of a sweep ({RUN} is not a sweep's); give another -o")
