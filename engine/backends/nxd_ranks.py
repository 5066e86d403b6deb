"""The ranks of NxD Inference's CPU mode: this process is the first, every other rank is a process that repeats it.

NxD starts its ranks with ``torchrun``, and each needs every call of the application with the same arguments. So the
first rank sends its calls to the others, over gloo, before it runs them. :func:`main` is another rank.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from neuronmm.models.errors import UserError
from neuronmm.models.neuronx import nxd_weights
from neuronmm.models.neuronx.checkpoint import Checkpoint
from neuronmm.models.neuronx.settings import Settings

_open: list[Ranks] = []


class Ranks:
    """The other ranks of one engine, and the process group of all. Call :meth:`close` once.

    Raises:
        UserError: another engine is open and one of the two has several ranks, or a rank did not start.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.size = settings.tp_degree
        if _open and max(self.size, _open[0].size) > 1:
            raise UserError("an engine that emulates NxD Inference is still open; on several cores only one can be")
        leave_groups()
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(self.size),
        }
        job = json.dumps([str(folder), {**asdict(settings), "dtype": str(settings.dtype).removeprefix("torch.")}])
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()", job],
                env={**os.environ, **variables, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(1, self.size)
        ]
        self._before = {name: os.environ.get(name) for name in (*variables, "RANK")}
        os.environ.update(variables, RANK="0")
        _open.append(self)
        for rank, process in enumerate(self.processes, 1):
            assert process.stdout is not None
            if not process.stdout.readline():
                self.close()
                raise UserError(f"rank {rank} of NxD Inference's CPU mode did not start; its error is above")

    def send(self, *call: Any) -> None:
        """Send a call, or None, to the other ranks."""
        dist.broadcast_object_list([call or None], src=0)

    def calls(self) -> Counter[str]:
        """Return the kernels that ran on the other ranks, as the session counts them."""
        if self.size == 1:
            return Counter()
        self.send("calls")
        counts: list[Any] = [None] * self.size
        dist.gather_object(Counter(), counts)
        return sum(counts, Counter())

    def close(self) -> None:
        """End the other ranks and leave the process group."""
        told = False
        if dist.is_initialized() and self.processes:
            with suppress(RuntimeError):  # a rank has died
                self.send()
                told = True
        for process in self.processes:
            if not told:
                process.terminate()
            process.communicate()
        _open.remove(self)
        if not _open:
            leave_groups()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def leave_groups() -> None:
    """Leave the process group of an earlier engine, if this process is in one."""
    parallel = sys.modules.get("neuronx_distributed.parallel_layers.parallel_state")
    if parallel is not None and parallel.model_parallel_is_initialized():
        parallel.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def join(model: Any, folder: Path, settings: Settings, resources: ExitStack) -> Ranks:
    """Start the other ranks of ``model``, which repeat its application's calls until ``resources`` are closed."""
    ranks = Ranks(folder, settings)
    resources.callback(ranks.close)
    if ranks.size > 1:
        forward = model.application.forward

        def announced(*arguments: Any, **options: Any) -> Any:
            ranks.send("forward", arguments, options)
            return forward(*arguments, **options)

        model.application.forward = announced
    return ranks


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Run one of the other ranks until the first one ends it; the only argument is the job."""
    from neuronmm.emulator.runtime import neuron_emulation

    ready = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what NxD prints must not fill the pipe
    folder, options = json.loads(sys.argv[1])
    settings = Settings(**{**options, "dtype": getattr(torch, options["dtype"])})
    shards = nxd_weights.split(Checkpoint(Path(folder), settings.dtype), settings, emulated=True)
    with neuron_emulation(runtime="nxd") as session:
        from neuronmm.models.neuronx import host_nxd

        model = host_nxd.Model(shards, settings)
        print("ready", file=ready, flush=True)
        host_nxd.to_cores(model, "")
        while True:
            call: list[Any] = [None]
            dist.broadcast_object_list(call, src=0)
            if call[0] is None:
                break
            if call[0][0] == "calls":
                dist.gather_object(session.calls)
                session.calls.clear()
            else:
                with torch.no_grad():
                    model.application.forward(*call[0][1], **call[0][2])
        dist.destroy_process_group()
