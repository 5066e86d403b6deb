"""A sweep's folder: of one process at a time, begun anew or gone on with, and told from anybody else's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neuronmm.compression.claim import MARK, Claim
from neuronmm.compression.config import renamed
from neuronmm.kernels.durable import WRITING
from neuronmm.models.documents import read_own, write_json
from neuronmm.models.errors import UserError
from neuronmm.models.output import stranger_in

RUN = "run.json"
"""The file with the settings of a sweep."""


@contextmanager
def claimed(out: Path, resume: bool) -> Iterator[None]:
    """Make the folder ``out``, or take up the one of an earlier sweep, and lock it for the duration of the block.

    Raises:
        UserError: another process is at work there, it exists and is not to be resumed, or it is no sweep's.
    """
    _check(out, resume)
    claim = Claim(out)
    try:
        _check(out, resume)  # another sweep may have been there before this one had the lock
        yield
    finally:
        if claim.empty():
            claim.remove()
        else:
            claim.unmark()


def describe(out: Path, run: dict[str, Any]) -> None:
    """Write down the settings ``run`` of the sweep in ``out``.

    Raises:
        UserError: the sweep was begun with others; only measures may have been added to them.
    """
    plan = out / RUN
    run = json.loads(json.dumps(run))
    before = read_own(plan) or run
    if isinstance(before.get("base"), dict):
        before = {**before, "base": renamed(before["base"], notice=False)}
    texts = before.get("texts")
    known = {name: file for name, file in run["texts"].items() if isinstance(texts, dict) and name in texts}
    comparable = {**run, "texts": known}
    if before.get("tasks") == {}:
        comparable.update(tasks={}, questions=before.get("questions"))
    if before.get("speed") is False:
        comparable.update(speed=False)
    for key, value in comparable.items():
        if before.get(key) != value:
            raise UserError(f"{out}: was started with another {key} ({before.get(key)!r}, now {run[key]!r})")
    if run != read_own(plan):
        write_json(plan, run)


def _check(out: Path, resume: bool) -> None:
    """Check that a sweep may begin in ``out``, or go on in it. One that was killed at once has left only its mark."""
    if not os.path.lexists(out):
        return
    if (out / MARK).is_file() and stranger_in(out, (MARK, RUN + WRITING)) is None:
        return
    if not resume:
        raise UserError(f"{out}: exists already; --resume continues the sweep in it, or give another -o")
    if "texts" not in (read_own(out / RUN) or {}):  # the folder of another command's work has a file of that name too
        raise UserError(f"{out}: is not the folder of a sweep ({RUN} is not a sweep's); give another -o")
