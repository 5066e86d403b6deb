"""A transformers model on a torch device, prepared for decoding; this alone is the CUDA backend."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from neuronmm.engine.decoder import TorchDecoder
from neuronmm.engine.slots import CHUNK, RowSlots
from neuronmm.engine.tensor_parallel import split
from neuronmm.kernels.ops import Op, choose, implementations
from neuronmm.models import processes
from neuronmm.models.errors import UserError
from neuronmm.models.load import check_weights, load_pretrained, map_pretrained
from neuronmm.models.lowrank import LowRankLinear, LowRankSwiGLU
from neuronmm.models.patch import fuse

MAX_BATCH = 8
"""Rows that run at once; more prompts run in groups of similar length."""


class TorchRunner:
    """A loaded model whose low-rank modules run the implementation ``impl`` (``auto``: the fastest for each call).

    Raises:
        UserError: there is no implementation ``impl``.
    """

    def __init__(self, model: Any, impl: str = "auto") -> None:
        known = {"auto", *(entry.name for op in Op for entry in implementations(op))}
        if impl not in known:
            raise UserError(f"unknown kernel implementation {impl!r}; there are: {', '.join(sorted(known))}")
        self._hold(fuse(model, impl), impl)

    def _hold(self, model: Any, impl: str) -> None:
        self.model: Any = model
        self.impl = impl
        norm = model.model.norm.weight  # a float in every model; other weights may have few bits
        self.device: torch.device = norm.device
        self.dtype: torch.dtype = norm.dtype
        self.backend: str = norm.device.type
        # longrope chooses its factors for a whole call, by its highest position: rows, and parts of one, would differ.
        self._whole = getattr(model.model.rotary_emb, "rope_type", "default") == "longrope"
        self.max_batch = 1 if self._whole else MAX_BATCH
        self.max_len: int | None = None
        self.continuous = False

    @property
    @torch.inference_mode()
    def path(self) -> str:
        """The implementations that a decode step uses, by op."""
        chosen = {}
        for module in self.model.modules():
            if isinstance(module, LowRankSwiGLU):
                parts = (module.gate_proj, module.up_proj, module.down_proj)
                x = torch.empty(1, parts[0].in_features, dtype=self.dtype, device=self.device)
                chosen[Op.SWIGLU] = choose(Op.SWIGLU, self.impl, x, *(part.factors for part in parts)).name
            elif isinstance(module, LowRankLinear):
                x = torch.empty(1, module.in_features, dtype=self.dtype, device=self.device)
                chosen[Op.LINEAR] = choose(Op.LINEAR, self.impl, x, module.factors).name
        if not chosen:
            return "dense, torch"
        return ", ".join(f"{op.value}={name}" for op, name in sorted(chosen.items()))

    def decoder(self, batch: int, max_len: int) -> TorchDecoder:
        """Create a decoder for ``batch`` rows of at most ``max_len`` positions."""
        return TorchDecoder(self.model, batch, max_len)

    def slots(self, batch: int, max_len: int) -> RowSlots:
        """Create a continuous batch of ``batch`` slots of at most ``max_len`` positions."""
        return RowSlots([self.decoder(1, max_len) for _ in range(batch)], None if self._whole else CHUNK)

    def sibling(self, impl: str) -> TorchRunner:
        """Return a runner with the same weights, not copied, and another implementation."""
        shared = (*self.model.parameters(), *self.model.buffers())
        twin = copy.copy(self)
        twin.impl = impl
        twin.model = copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared})
        for module in twin.model.modules():
            if isinstance(module, (LowRankLinear, LowRankSwiGLU)):
                module.impl = impl
        return twin


def missing_cuda() -> str | None:
    """Return None if torch sees a GPU, otherwise what to do."""
    if torch.cuda.is_available():
        return None
    return "torch sees no CUDA GPU; install a CUDA build of torch and a driver, or use --backend cpu"


class SplitRunner(TorchRunner):
    """A model whose linears are split over the processes of a run; they are plain torch modules."""

    def __init__(self, model: Any) -> None:
        self._hold(model, "torch")

    @property
    def path(self) -> str:
        """One line that names the kernels and the processes."""
        return f"torch modules, split over {processes.size()} processes"


def load_split(folder: Path, dtype: torch.dtype, impl: str, device: str) -> SplitRunner:
    """Load this process's part of the model of ``folder``; the whole model is only mapped from the files.

    Raises:
        UserError: ``impl`` is not ``auto``, or the model cannot be split over this number of processes.
    """
    if impl != "auto":
        raise UserError(f"--impl {impl}: several processes run plain torch modules; leave out --impl")
    model = split(map_pretrained(folder, dtype), str(folder))
    check_weights(model, folder)
    return SplitRunner(model.to(device))


def load_cuda(folder: Path, dtype: torch.dtype, impl: str) -> TorchRunner:
    """Load the model of ``folder`` into the memory of this process's GPU, the first visible one without torchrun."""
    if processes.size() > 1:
        return load_split(folder, dtype, impl, "cuda")
    return TorchRunner(load_pretrained(folder, dtype, "cuda"), impl)
