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
    """The input or output tensors of a program, by number; ``names`` are used in errors."""

    def __init__(self, names: Sequence[str], ranks: int) -> None:
        self.names, self.ranks = list(names), ranks
        self.init()

    def init(self) -> None:
        """Remove all tensors."""
        self.tensors: dict[int, DeviceTensor] = {}

    def add(self, number: int, tensor: DeviceTensor) -> None:
        """Set a tensor."""
        self.tensors[number] = tensor

    def all(self) -> list[DeviceTensor]:
        """Return all tensors, in order.

        Raises:
            ValueError: a tensor was never set.
        """
        missing = [name for number, name in enumerate(self.names) if number not in self.tensors]
        if missing:
            raise ValueError(f"no tensor was set for {', '.join(missing)}")
        return [self.tensors[number] for number in range(len(self.names))]


class ParallelModel:
    """A compiled program on ``ranks`` cores; it can run after :meth:`load`."""

    settings = Settings()
    """Settings of the programs that are loaded from now on; the session replaces them."""

    def __init__(self, neff: bytes, ranks: int, first_core: int = 0, cores: int | None = None) -> None:
        self.neff, self.ranks = neff, ranks
        self.program: Program | None = None

    def load(self) -> None:
        """Check and plan the program.

        Raises:
            ValueError: the program was compiled for a device.
            InvalidGraphError: XLA would refuse the graph.
            UnsupportedError: the graph contains an instruction that is not emulated.
        """
        self.program = Program(HloModuleProto.FromString(module_bytes(self.neff)), self.ranks, self.settings)


class ParallelExecutor:
    """A program with its tensors; every call copies ``copied_in`` to the device and ``copied_out`` from it."""

    def __init__(
        self, model: ParallelModel, inputs: ParallelTensorSet, outputs: ParallelTensorSet,
        copied_in: Sequence[DeviceTensor], copied_out: Sequence[DeviceTensor],
    ) -> None:  # fmt: skip
        self.model, self.inputs, self.outputs = model, inputs, outputs
        self.copied_in, self.copied_out = list(copied_in), list(copied_out)


@torch.no_grad()
def run(model: ParallelModel, inputs: ParallelTensorSet, outputs: ParallelTensorSet) -> None:
    """Run a program on ``inputs`` and write the results to ``outputs``.

    Raises:
        RuntimeError: the program is not loaded.
        ValueError: an input or output was never set.
        InvalidGraphError: an input's shape or dtype is not that of its parameter.
    """
    if model.program is None:
        raise RuntimeError("the model is not loaded")
    results = model.program([tensor.shards for tensor in inputs.all()])
    for tensor, values in zip(outputs.all(), results, strict=True):
        for shard, value in zip(tensor.shards, values, strict=True):
            if value.data_ptr() != shard.data_ptr() or value.stride() != shard.stride():
                shard.copy_(value)


def execute(executor: ParallelExecutor, inputs: Sequence[Tensor], return_ranks: int = -1) -> list[Tensor]:
    """Copy ``inputs`` to every rank, run the program, and return its outputs.

    Args:
        executor: the program and its tensors.
        inputs: values of the first ``copied_in`` tensors.
        return_ranks: how many ranks' outputs to return, concatenated along axis 0; -1 for all.
    """
    for tensor, value in zip(executor.copied_in, inputs, strict=False):
        write(tensor, [value] * len(tensor.shards))
    run(executor.model, executor.inputs, executor.outputs)
    ranks = executor.model.ranks if return_ranks < 0 else return_ranks
    return [torch.cat(tensor.shards[:ranks]) for tensor in executor.copied_out] if ranks else []
