"""The Neuron backend: a Neuron host on NeuronCores, or the same host on a CPU with an emulated runtime."""

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

from neuronmm.engine.backends import emulation, nxd_ranks
from neuronmm.engine.backends.neuron_decoder import NeuronDecoder, NeuronSlots
from neuronmm.engine.decoder import Decoder
from neuronmm.models.errors import UserError
from neuronmm.models.load import load_config
from neuronmm.models.neuronx import cache, nxd_weights, sdk
from neuronmm.models.neuronx.checkpoint import Checkpoint
from neuronmm.models.neuronx.settings import Settings
from neuronmm.models.neuronx.weights import Shards

N_POSITIONS = 512
"""Default sequence length, unless the model's context is shorter."""

KERNELS: dict[str, emulation.Kernels] = {"auto": "nki", "nki": "nki", "reference": "reference"}
"""Kernel name -> what an emulated custom call runs: the NKI function, or its reference in torch."""


@dataclass(frozen=True)
class NeuronOptions:
    """The options of ``load`` for this backend.

    ``tp_degree``: NeuronCores that share the model. ``batch_size``: rows of a compiled step. ``n_positions``: longest
    sequence, prompt and answer together (default: 512, or the model's context if that is shorter). ``layout``: HSB or
    BSH (default: the host's). ``host``: a name of :data:`.sdk.HOSTS` (default: the first that is present).
    ``continuous``: rows are slots that sequences join and leave while others run. ``emulate``: run the host on the
    CPU of this machine.
    """

    tp_degree: int = 1
    batch_size: int = 1
    n_positions: int | None = None
    layout: str | None = None
    continuous: bool = False
    emulate: bool = False
    host: str | None = None

    def settings(self, dtype: torch.dtype, context: int, host: sdk.Host) -> Settings:
        """Return the build settings for a model with a context of ``context`` positions.

        Raises:
            UserError: a value is out of range, or the host has no such layout.
        """
        positions = min(N_POSITIONS, context) if self.n_positions is None else self.n_positions
        layout = self.layout or host.layouts[0]
        settings = Settings(dtype, self.tp_degree, self.batch_size, positions, layout, self.continuous)
        if layout not in host.layouts:
            raise UserError(f"layout {layout!r}: {host.name} has only {', '.join(host.layouts)}")
        return settings


class NeuronRunner:
    """A checkpoint in a Neuron host. It compiles, or reads a compiled graph from the cache, on first use."""

    def __init__(
        self, shards: Shards, settings: Settings, host: sdk.Host, adapter: Any, session: Any, resources: ExitStack
    ) -> None:
        self.shards, self.settings, self.host, self.session = shards, settings, host, session
        self.adapter, self._resources = adapter, resources
        self.ranks: nxd_ranks.Ranks | None = None
        self.device, self.dtype, self.backend = torch.device("cpu"), settings.dtype, "neuron"
        self.max_batch = settings.batch_size
        self.max_len: int | None = settings.n_positions
        self.continuous = settings.continuous
        self.cached: bool | None = None
        self.ready_seconds = 0.0
        self._model: Any = None
        self.close = weakref.finalize(self, resources.close)
        """Release the cores, or end the emulation; the runner cannot be used afterwards."""

    @property
    def model(self) -> Any:
        """The host's model, loaded onto its cores."""
        if self._model is None:
            start = time.perf_counter()
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # avoids a warning when a host forks to compile
            model = self.adapter.Model(self.shards, self.settings)
            if self.session and self.host.runtime == "nxd":
                self.ranks = nxd_ranks.join(model, self.shards.checkpoint.folder, self.settings, self._resources)
            key = cache.key(self.shards, self.settings, f"{self.adapter.NAME} {self.adapter.VERSION}")
            to_cores = self.adapter.to_cores if self.host.runtime == "nxd" else cache.to_cores
            self.cached = to_cores(model, key)
            self.ready_seconds = time.perf_counter() - start
            self._model = model
        return self._model

    @property
    def path(self) -> str:
        """One line that names the kernels, the host, its device and whether it had to compile."""
        words = {True: "compile cache hit", False: "compile cache miss", None: "the host's CPU mode"}
        compiled = self.model and words[self.cached]
        where = "emulated on this CPU" if self.session else "NeuronCores"
        kernels = "dense" if not self.shards.checkpoint.ranks else "low-rank NKI"
        batch = f"{'continuous ' if self.continuous else ''}batch {self.max_batch}"
        sizes = f"tp {self.settings.tp_degree}, {batch}, {self.max_len} positions"
        return f"{kernels}; {self.adapter.NAME} {self.adapter.VERSION}, {where}, {sizes}; {compiled}"

    def decoder(self, batch: int, max_len: int) -> Decoder:
        """Create a decoder for ``batch`` rows of at most ``max_len`` positions.

        Raises:
            UserError: the compiled graphs are smaller.
        """
        self._check(batch, max_len)
        return (NeuronSlots if self.continuous else NeuronDecoder)(self, batch, max_len)

    def slots(self, batch: int, max_len: int) -> NeuronSlots:
        """Create a continuous batch of ``batch`` slots of at most ``max_len`` positions.

        Raises:
            UserError: the compiled graphs are smaller, or their rows start together.
        """
        self._check(batch, max_len)
        if not self.continuous:
            raise UserError("the graphs of this model have no slots; load the model with continuous=True")
        return NeuronSlots(self, batch, max_len)

    def _check(self, batch: int, max_len: int) -> None:
        sizes = self.settings
        if batch > sizes.batch_size or max_len > sizes.n_positions:
            raise UserError(
                f"{batch} rows of {max_len} positions do not fit graphs of batch_size {sizes.batch_size} and "
                f"n_positions {sizes.n_positions}; load the model with larger ones"
            )

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Call the host's ``generate``, with transformers' interface. Dimensions: both [batch, prompt], left-padded."""
        config = load_config(self.shards.checkpoint.folder)
        return self.adapter.Generation(self.model, config, self.settings).generate(
            input_ids=input_ids, attention_mask=attention_mask, **kwargs
        )


def missing(*, emulate: bool = False, host: str | None = None, **options: Any) -> str | None:
    """Return None if a host can run here or the run is emulated, otherwise what is missing and what to do."""
    if emulate:
        return None
    reason = sdk.missing(host)
    return reason and f"{reason}; or run it emulated on this CPU: --emulate"


def load(folder: Path, dtype: torch.dtype, impl: str, **options: Any) -> NeuronRunner:
    """Load the model of ``folder`` into the installed host, after all checks; it compiles on first use.

    Raises:
        UserError: an option is out of range, the model does not fit, or the SDK is not supported.
    """
    chosen = NeuronOptions(**options)
    host = sdk.choose(chosen.host)
    if impl not in KERNELS or (impl == "reference" and (not chosen.emulate or host.runtime == "nxd")):
        raise UserError(
            f"kernel {impl!r} is not for backend neuron; there are: auto, nki and, with --emulate on an HLO host, "
            f"reference"
        )
    checkpoint = Checkpoint(folder, dtype)
    settings = chosen.settings(dtype, checkpoint.architecture.positions, host)
    settings.check(checkpoint.architecture)
    if host.runtime == "nxd":
        shards = nxd_weights.split(checkpoint, settings, chosen.emulate)
    else:
        shards = Shards(checkpoint, settings.tp_degree)
    with ExitStack() as stack:
        session = None
        if chosen.emulate:
            session, release = emulation.acquire(KERNELS[impl], host.runtime)
            stack.callback(release)
        else:
            sdk.check_cores(settings.tp_degree)
        os.environ.setdefault("NXD_LOG_LEVEL", "error")  # NxD logs to stdout, among the results
        adapter = sdk.adapter(host)  # may fail; the stack then releases what it holds
        return NeuronRunner(shards, settings, host, adapter, session, stack.pop_all())
