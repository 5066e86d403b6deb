"""Compiled programs on emulated NeuronCores: ``torch.classes.neuron`` and the operators that run them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from neuronmm.emulator.hlo import Program, Settings
from neuronmm.emulator.pyhlo.messages import HloModuleProto
from neuronmm.emulator.runtime.compiler import module_bytes
from neuronmm.emulator.runtime.tensors import DeviceTensor, write


class ParallelTensorSet:
    """The inputs or the outputs of a program, by number."""

    def __init__(self, names: Sequence[str], ranks: int) -> None:
        self.names, self.ranks = list(names), ranks
        self.init()

    def init(self) -> None:
        """Forget all tensors."""
        self.tensors: dict[int, DeviceTensor] = {}

    def add(self, number: int, tensor: DeviceTensor) -> None:
        """Set one of them."""
        self.tensors[number] = tensor

    def all(self) -> list[DeviceTensor]:
        """All of them, in order.

        Raises:
            ValueError: one was never set.
        """
        missing = [name for number, name in enumerate(self.names) if number not in self.tensors]
        if missing:
            raise ValueError(f"no tensor was set for {', '.join(missing)}")
        return [self.tensors[number] for number in range(len(self.names))]


class ParallelModel:
    """A program on ``ranks`` cores; ready to run after :meth:`load`."""

    settings = Settings()
    """What programs made ready from now on count into; the session sets it."""

    def __init__(self, neff: bytes, ranks: int, first_core: int = 0, cores: int | None = None) -> None:
        self.neff, self.ranks = neff, ranks
        self.program: Program | None = None

    def load(self) -> None:
        """Plan the program.

        Raises:
            UnsupportedError: the graph holds an instruction that is not emulated.
        """
        self.program = Program(HloModuleProto.FromString(module_bytes(self.neff)), self.ranks, self.settings)


class ParallelExecutor:
    """A program with the tensors it runs on, of which some are copied from and to the host on every call."""

    def __init__(
        self, model: ParallelModel, inputs: ParallelTensorSet, outputs: ParallelTensorSet,
        given: Sequence[DeviceTensor], returned: Sequence[DeviceTensor],
    ) -> None:  # fmt: skip
        self.model, self.inputs, self.outputs = model, inputs, outputs
        self.given, self.returned = list(given), list(returned)


@torch.no_grad()
def run(model: ParallelModel, inputs: ParallelTensorSet, outputs: ParallelTensorSet) -> None:
    """Run a program on its tensors.

    Raises:
        RuntimeError: the program is not loaded.
    """
    if model.program is None:
        raise RuntimeError("the model is not loaded")
    results = model.program([tensor.shards for tensor in inputs.all()])
    for tensor, values in zip(outputs.all(), results, strict=True):
        for shard, value in zip(tensor.shards, values, strict=True):
            if value.data_ptr() != shard.data_ptr() or value.stride() != shard.stride():
                shard.copy_(value)


def execute(executor: ParallelExecutor, inputs: Sequence[Tensor], return_ranks: int = -1) -> list[Tensor]:
    """Copy ``inputs``, the first of the given ones, to every rank, run, and return the outputs of the first ranks
    (-1: all) joined along axis 0."""
    for tensor, value in zip(executor.given, inputs, strict=False):
        write(tensor, [value] * len(tensor.shards))
    run(executor.model, executor.inputs, executor.outputs)
    ranks = executor.model.ranks if return_ranks < 0 else return_ranks
    return [torch.cat(tensor.shards[:ranks]) for tensor in executor.returned] if ranks else []
