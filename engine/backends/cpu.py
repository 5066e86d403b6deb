"""The CPU backend: decode steps run in the C++ core if it supports the model, prefill in the core or in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from neuronmm.engine.backends.torch_runner import TorchRunner, load_split
from neuronmm.engine.cpu_decoder import CpuDecoder, refuses
from neuronmm.engine.decoder import TorchDecoder
from neuronmm.engine.slots import CpuSlots, RowSlots
from neuronmm.kernels import KernelError
from neuronmm.kernels.cpu import arena, isa
from neuronmm.models import processes
from neuronmm.models.errors import UserError
from neuronmm.models.load import check_weights, map_pretrained
from neuronmm.models.low_bits import LowBitsModule, WeightDtype, quantise_weights


class CpuRunner(TorchRunner):
    """A model in main memory. ``auto`` and ``cpu`` decode in the C++ core, all other implementations in torch.

    Raises:
        KernelError: ``impl`` is ``cpu`` and the core does not support the model.
    """

    @property
    def path(self) -> str:
        """One line that says how a decode step runs."""
        low = {type(part.matrix).__name__ for part in self.model.modules() if isinstance(part, LowBitsModule)}
        weights = "".join(f", {name.lower()}" for name in sorted(low))
        if self._in_torch(1):
            return super().path + weights
        pages = "huge pages" if arena.huge_bytes(self.model.get_input_embeddings().weight) else "4 KiB pages"
        prompts = "C++" if CpuDecoder(self.model, 1, 1).reads_prompts else "torch"
        threads = f"{torch.get_num_threads()} threads"
        return f"whole step in C++ ({isa()}{weights}), prompts in {prompts}, {threads}, {pages}"

    def decoder(self, batch: int, max_len: int) -> TorchDecoder:
        """Create a decoder for ``batch`` rows of at most ``max_len`` positions."""
        return (TorchDecoder if self._in_torch(batch) else CpuDecoder)(self.model, batch, max_len)

    def slots(self, batch: int, max_len: int) -> RowSlots:
        """Create a continuous batch of ``batch`` slots of at most ``max_len`` positions."""
        return super().slots(batch, max_len) if self._in_torch(1) else CpuSlots(self.model, batch, max_len)

    def rounded(self, dtype: WeightDtype) -> TorchRunner:
        """Return a runner of the same model with its dense weights rounded; both share all other tensors.

        Raises:
            UserError: the weights have few bits already.
        """
        twin, mine = self.sibling(self.impl), {id(parameter) for parameter in self.model.parameters()}
        quantise_weights(twin.model, dtype)
        arena.gather(parameter for parameter in twin.model.parameters() if id(parameter) not in mine)
        return twin

    def _in_torch(self, batch: int) -> bool:
        if self.impl not in ("auto", "cpu"):
            return True
        reason = refuses(self.model, batch)
        if reason is not None and self.impl == "cpu":
            raise KernelError(f"the decode step cannot run on 'cpu': {reason}")
        return reason is not None


def missing(**options: Any) -> str | None:
    """Return None: there always is a CPU."""
    return None


def load(folder: Path, dtype: torch.dtype, impl: str, weight_dtype: WeightDtype | None = None) -> TorchRunner:
    """Load the model of ``folder`` into main memory, with all weights in one arena.

    ``weight_dtype`` is what :func:`~neuronmm.models.low_bits.quantise_weights` rounds the dense weights to; None leaves
    them as they are. Of several processes each loads its part, and decodes in torch: the C++ core runs whole steps.

    Raises:
        UserError: there is no such ``weight_dtype``, the C++ core cannot run the rounded model, or the checkpoint is
            damaged.
    """
    if processes.size() > 1:
        if weight_dtype is not None:
            raise UserError(
                f"weights in {weight_dtype} need the C++ core, which runs in one process; leave out torchrun"
            )
        return load_split(folder, dtype, impl, "cpu")
    model = map_pretrained(folder, dtype)
    if weight_dtype is not None:
        check_weights(model, folder)  # names the tensor that holds NaN
        quantise_weights(model, weight_dtype)
        reason = refuses(model, 1) if impl in ("auto", "cpu") else None
        if reason is not None:  # torch would convert every weight in every step
            raise UserError(f"weights in {weight_dtype} need the C++ core, which does not run this model: {reason}")
    runner = CpuRunner(model, impl)
    arena.gather(runner.model.parameters())
    check_weights(runner.model, folder)  # after the move, which read the files: four times as fast
    return runner
