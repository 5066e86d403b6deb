"""The work folder as all processes of a run but the first see it: they read what that one writes.

Only the states of a process's own rows are files of its own, in a folder inside the work folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.workspace import FINAL, MEMBER, RUN, SEARCH, Workspace, work_folder
from neuronmm.models import processes
from neuronmm.models.documents import read_own
from neuronmm.models.errors import UserError
from neuronmm.models.output import Inputs, output_folder


class Member(Workspace):
    """The files of one process of a run; see :class:`Workspace`. Process 0 has a Workspace, which is made first."""

    def __init__(self, out: str | Path) -> None:
        self.out = output_folder(out)
        self.folder = self.common / MEMBER.format(processes.rank())

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        """The folder stays until the first process removes it."""

    def protect(self, *inputs: str | Path | None) -> None:
        """The first process checks that the work folder is separate from the inputs."""

    def begin(self, run: dict[str, Any]) -> None:
        """Make the folder of this process in the work folder, which the first process has begun.

        Raises:
            UserError: this process does not see the work folder.
        """
        if not (self.common / RUN).is_file():
            raise UserError(f"{self.common}: is not visible on this machine; all processes need one common file system")
        self.folder.mkdir(exist_ok=True)

    @property
    def common(self) -> Path:
        return work_folder(self.out)

    def part(self, index: int) -> Path:
        return self.common / super().part(index).name

    def save_layer(self, index: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """The first process writes the layers."""

    def save_search(self, search: dict[str, Any]) -> None:
        """The first process writes the search."""

    def search(self) -> dict[str, Any] | None:
        return read_own(self.common / SEARCH)

    def finish(self, fill: Callable[[Path], None]) -> None:
        """Take part in what the processes do together while the first one fills the folder of the checkpoint."""
        fill(self.common / FINAL)


def workspace_of(out: str | Path, inputs: Inputs, *, resume: bool, force: bool) -> Workspace:
    """Return the work folder of a run as this process sees it.

    Raises:
        UserError: as :class:`Workspace`.
    """
    return processes.in_turn(
        lambda: Member(out) if processes.rank() else Workspace(out, inputs, resume=resume, force=force)
    )


def check_processes(config: CompressionConfig) -> None:
    """Check that several processes can share a run of these settings.

    Raises:
        UserError: they cannot.
    """
    count = processes.size()
    if count == 1:
        return
    if not config.needs_text:
        raise UserError(
            f"--method {config.method}: plain SVD has no rows that {count} processes could share; leave out torchrun"
        )


def check_rows(rows: Tensor, held_out: Tensor, config: CompressionConfig) -> None:
    """Check that a budget and recovery have rows enough, and that every process gets some of the rows [rows, length].

    Raises:
        UserError: there are too few.
    """
    if config.recover != "off" and len(rows) < 2:
        raise UserError(f"recovery trains on two or more calibration rows, not {len(rows)}; calibrate on more")
    if config.budget is not None and torch.equal(rows, held_out):
        raise UserError("a budget is kept on rows of its own, and the text has a single one; calibrate on more")
    count = processes.size()
    if count > 1 and min(len(rows), len(held_out)) < count:
        raise UserError(
            f"{len(rows)} calibration rows and {len(held_out)} held-out rows are too few for {count} processes; "
            "calibrate on more, or start fewer"
        )
