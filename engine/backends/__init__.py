"""Where a model can run: a small table of backends, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from neuronmm.engine.backends import cpu, cuda, neuron
from neuronmm.engine.decoder import Decoder
from neuronmm.models.errors import UserError


class Host(Protocol):
    """A model loaded on a backend: it makes decoders and says what it is."""

    device: torch.device
    dtype: torch.dtype

    @property
    def path(self) -> str:
        """One line: which kernels serve this model here."""
        ...

    def decoder(self, batch: int, max_len: int) -> Decoder:
        """A decoder for ``batch`` rows of at most ``max_len`` positions."""
        ...


@dataclass(frozen=True)
class Backend:
    """One kind of place to run.

    ``missing()`` is None where the backend can run, else the reason and the way out. ``load(folder, dtype, impl)``
    gives the host.
    """

    name: str
    missing: Callable[[], str | None]
    load: Callable[[Path, torch.dtype, str], Host]


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("cuda", cuda.missing, cuda.load),
        Backend("cpu", cpu.missing, cpu.load),
        Backend("neuron", neuron.missing, neuron.load),
    )
}


def choose(name: str) -> Backend:
    """The backend called ``name``; ``auto`` is CUDA where there is one, else the CPU.

    Raises:
        UserError: there is no such backend, or it cannot run on this machine.
    """
    if name == "auto":
        return BACKENDS["cpu"] if BACKENDS["cuda"].missing() else BACKENDS["cuda"]
    if name not in BACKENDS:
        raise UserError(f"unknown backend {name!r}; there are: auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[name].missing()
    if reason is not None:
        raise UserError(f"backend {name} cannot run here: {reason}")
    return BACKENDS[name]
