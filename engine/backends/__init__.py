"""The table of backends, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from neuronmm.engine.backends import cpu, neuron
from neuronmm.engine.backends.torch_runner import load_cuda, missing_cuda
from neuronmm.engine.continuous import Slots
from neuronmm.engine.decoder import Decoder
from neuronmm.models.errors import UserError


class Runner(Protocol):
    """A model loaded on a backend. It creates decoders.

    ``max_batch`` is the number of rows that can run at once. ``max_len`` is the largest number of positions of a
    sequence, None if only the model limits it. ``continuous`` says whether several prompts run as a continuous batch
    rather than as static ones.
    """

    backend: str
    device: torch.device
    dtype: torch.dtype
    max_batch: int
    max_len: int | None
    continuous: bool

    @property
    def path(self) -> str:
        """One line that names the kernels in use."""
        ...

    def decoder(self, batch: int, max_len: int) -> Decoder:
        """Create a decoder for ``batch`` rows of at most ``max_len`` positions."""
        ...

    def slots(self, batch: int, max_len: int) -> Slots:
        """Create a continuous batch of ``batch`` slots of at most ``max_len`` positions."""
        ...


@dataclass(frozen=True)
class Backend:
    """One backend.

    ``missing(**options)`` returns None if the backend can run here, otherwise the reason and what to do. ``load(folder,
    dtype, impl, **options)`` returns the runner. ``options`` are the names of the backend's own options.
    """

    name: str
    missing: Callable[..., str | None]
    load: Callable[..., Runner]
    options: frozenset[str] = frozenset()


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("cuda", missing_cuda, load_cuda),
        Backend("cpu", cpu.missing, cpu.load, frozenset(("weight_dtype",))),
        Backend("neuron", neuron.missing, neuron.load, frozenset(f.name for f in fields(neuron.NeuronOptions))),
    )
}


_FLAGS = {"tp_degree": "--tp", "n_positions": "--positions"}
"""Options of the Neuron backend that the command line names otherwise."""


def choose(name: str, options: Mapping[str, Any] | None = None) -> Backend:
    """Return the backend ``name``; ``auto`` is CUDA if torch sees a GPU and it has the options, otherwise the CPU.

    Raises:
        UserError: there is no such backend, it cannot run on this machine, or it lacks one of the ``options``.
    """
    options = options or {}
    if name == "auto":
        name = "cpu" if BACKENDS["cuda"].missing() or set(options) - BACKENDS["cuda"].options else "cuda"
    if name not in BACKENDS:
        raise UserError(f"unknown backend {name!r}; there are: auto, {', '.join(BACKENDS)}")
    chosen = BACKENDS[name]
    for option in options:
        if option not in chosen.options:
            owners = [backend.name for backend in BACKENDS.values() if option in backend.options]
            where = f"; backend {owners[0]} has it" if owners else ""
            flag = f" (on the command line {_FLAGS[option]}, with --backend neuron)" if option in _FLAGS else ""
            raise UserError(f"backend {name} has no option {option}{where}{flag}")
    reason = chosen.missing(**options)
    if reason is not None:
        raise UserError(f"backend {name} cannot run here: {reason}")
    return chosen
