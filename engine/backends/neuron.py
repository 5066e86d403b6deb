"""The Neuron backend: a Neuron host on NeuronCores, or the same host on a CPU with the runtime below it emulated."""

from __future__ import annotations

import os
import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuronmm.engine.backends import emulation
from neuronmm.engine.backends.neuron_decoder import NeuronDecoder, NeuronSlots
from neuronmm.engine.decoder import Decoder
from neuronmm.models.errors import UserError
from neuronmm.models.load import load_config
from neuronmm.models.neuronx import cache, sdk
from neuronmm.models.neuronx.checkpoint import Checkpoint
from neuronmm.models.neuronx.settings import Settings
from neuronmm.models.neuronx.weights import Shards

N_POSITIONS = 512
"""Sequence length where none is asked for and the model has room for it."""

KERNELS: dict[str, emulation.Kernels] = {"auto": "nki", "nki": "nki", "reference": "reference"}
"""Kernel name -> what an emulated custom call runs: the NKI function, or its sum in plain torch."""


@dataclass(frozen=True)
class NeuronOptions:
    """What ``load`` takes for this backend, beside the model.

    ``tp_degree``: NeuronCores that share the model. ``batch_size``: rows of a compiled step. ``n_positions``: longest
    sequence, prompt and answer together (default: 512, or the model's context if that is less). ``layout``: HSB or BSH.
    ``continuous``: rows are slots, which a sequence joins and leaves while others run. ``emulate``: run the host on
    this machine's CPU.
    """

    tp_degree: int = 1
    batch_size: int = 1
    n_positions: int | None = None
    layout: str = "HSB"
    continuous: bool = False
    emulate: bool = False

    def settings(self, dtype: torch.dtype, most: int) -> Settings:
        """The build these options ask for, of a model with a context of ``most`` positions."""
        positions = min(N_POSITIONS, most) if self.n_positions is None else self.n_positions
        return Settings(dtype, self.tp_degree, self.batch_size, positions, self.layout, self.continuous)


class NeuronHost:
    """A checkpoint in a Neuron host. It compiles, or takes a compiled graph from the cache, when first used."""

    def __init__(self, shards: Shards, settings: Settings, adapter: Any, session: Any, leave: ExitStack) -> None:
        self.shards, self.settings, self.adapter, self.session = shards, settings, adapter, session
        self.device, self.dtype, self.backend = torch.device("cpu"), settings.dtype, "neuron"
        self.max_batch = settings.batch_size
        self.max_len: int | None = settings.n_positions
        self.continuous = settings.continuous
        self.cached: bool | None = None
        self.ready_seconds = 0.0
        self._model: Any = None
        self.close = weakref.finalize(self, leave.close)
        """Gives the cores back, or ends the emulation; the host cannot be used after it."""

    @property
    def model(self) -> Any:
        """The host's model, on its cores."""
        if self._model is None:
            start = time.perf_counter()
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # hosts compile in forks, tokenizers warn of those
            model = self.adapter.Model(self.shards, self.settings)
            name = cache.key(self.shards, self.settings, f"{self.adapter.NAME} {self.adapter.VERSION}")
            self.cached = cache.to_cores(model, name)
            self.ready_seconds = time.perf_counter() - start
            self._model = model
        return self._model

    @property
    def path(self) -> str:
        """One line: which host, where, which kernels, and whether it had to compile."""
        made = self.model and ("compile cache hit" if self.cached else "compile cache miss")
        where = "emulated on this CPU" if self.session else "NeuronCores"
        kernels = "dense" if not self.shards.checkpoint.ranks else "low-rank NKI"
        batch = f"{'continuous ' if self.continuous else ''}batch {self.max_batch}"
        sizes = f"tp {self.settings.tp_degree}, {batch}, {self.max_len} positions"
        return f"{kernels}; {self.adapter.NAME} {self.adapter.VERSION}, {where}, {sizes}; {made}"

    def decoder(self, batch: int, max_len: int) -> Decoder:
        """A decoder for ``batch`` rows of at most ``max_len`` positions.

        Raises:
            UserError: the compiled graphs are smaller than that.
        """
        sizes = self.settings
        if batch > sizes.batch_size or max_len > sizes.n_positions:
            raise UserError(
                f"{batch} rows of {max_len} positions do not fit graphs of batch_size {sizes.batch_size} and "
                f"n_positions {sizes.n_positions}; load the model with larger ones"
            )
        return (NeuronSlots if self.continuous else NeuronDecoder)(self, batch, max_len)

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """The host's own ``generate``, transformers' interface. Dimensions: both [batch, prompt], left-padded."""
        config = load_config(self.shards.checkpoint.folder)
        return self.adapter.Generation(self.model, config, self.settings).generate(
            input_ids=input_ids, attention_mask=attention_mask, **kwargs
        )


def missing(*, emulate: bool = False, **options: Any) -> str | None:
    """None where a real host is here, or is not needed; else what is missing and the ways out."""
    if emulate:
        return None
    reason = sdk.missing()
    return reason and f"{reason}; or run it emulated on this CPU: --emulate"


def load(folder: Path, dtype: torch.dtype, impl: str, **options: Any) -> NeuronHost:
    """The model of ``folder`` in the host that is here; everything that can be refused is refused before it compiles.

    Raises:
        UserError: an option out of range, a model that does not fit, or an SDK that does not.
    """
    asked = NeuronOptions(**options)
    if impl not in KERNELS or (impl == "reference" and not asked.emulate):
        raise UserError(f"kernel {impl!r} is not for backend neuron; there are: auto, nki, and, emulated, reference")
    checkpoint = Checkpoint(folder, dtype)
    settings = asked.settings(dtype, checkpoint.architecture.positions)
    settings.check(checkpoint.architecture)
    shards = Shards(checkpoint, settings.tp_degree)
    with ExitStack() as stack:
        session = None
        if asked.emulate:
            session, let_go = emulation.hold(KERNELS[impl])
            stack.callback(let_go)
        else:
            sdk.check_cores(settings.tp_degree)
        adapter = sdk.host()
        return NeuronHost(shards, settings, adapter, session, stack.pop_all())
