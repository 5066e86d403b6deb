"""Where a model can run: a small table of backends, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from neuronmm.engine.backends import cpu, cuda, neuron
from neuronmm.engine.decoder import Decoder
from neuronmm.models.errors import UserError


class Host(Protocol):
    """A model loaded on a backend: it makes decoders and says what it is.

    ``max_batch``: rows that can run at once. ``max_len``: positions of a sequence, None: as many as the model has.
    ``continuous``: its decoders are :class:`~neuronmm.engine.continuous.Slots`, too.
    """

    backend: str
    device: torch.device
    dtype: torch.dtype
    max_batch: int
    max_len: int | None
    continuous: bool

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

    ``missing(**options)`` is None where the backend can run, else the reason and the way out. ``load(folder, dtype,
    impl, **options)`` gives the host. ``options`` are the names of what it takes beside a model.
    """

    name: str
    missing: Callable[..., str | None]
    load: Callable[..., Host]
    options: frozenset[str] = frozenset()


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("cuda", cuda.missing, cuda.load),
        Backend("cpu", cpu.missing, cpu.load),
        Backend("neuron", neuron.missing, neuron.load, frozenset(f.name for f in fields(neuron.NeuronOptions))),
    )
}


def choose(name: str, options: Mapping[str, Any] | None = None) -> Backend:
    """The backend called ``name``; ``auto`` is CUDA where there is one, else the CPU.

    Raises:
        UserError: there is no such backend, it cannot run on this machine, or it has no such ``options``.
    """
    if name == "auto":
        name = "cpu" if BACKENDS["cuda"].missing() else "cuda"
    if name not in BACKENDS:
        raise UserError(f"unknown backend {name!r}; there are: auto, {', '.join(BACKENDS)}")
    chosen, options = BACKENDS[name], options or {}
    for option in options:
        if option not in chosen.options:
            owners = [backend.name for backend in BACKENDS.values() if option in backend.options]
            raise UserError(f"backend {name} has no option {option}" + (f"; {owners[0]} has" if owners else ""))
    reason = chosen.missing(**options)
    if reason is not None:
        raise UserError(f"backend {name} cannot run here: {reason}")
    return chosen
