"""Tensors in the memory of emulated NeuronCores, and the operators on them: ``torch.ops.neuron``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DeviceTensor:
    """A tensor a rank, all of one shape; ``shards[rank]`` is that core's memory."""

    device = torch.device("privateuseone")

    def __init__(self, shards: Sequence[Tensor]) -> None:
        self.shards = list(shards)

    @property
    def shape(self) -> torch.Size:
        """The shape on one rank."""
        return self.shards[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype on every rank."""
        return self.shards[0].dtype


def to_device(tensors: Sequence[Tensor]) -> DeviceTensor:
    """Copy a tensor a rank to the device.

    Raises:
        ValueError: shapes or dtypes differ between ranks.
    """
    if len({(t.shape, t.dtype) for t in tensors}) != 1:
        raise ValueError(f"ranks need tensors of one shape and dtype, not {[(t.shape, t.dtype) for t in tensors]}")
    return DeviceTensor([t.detach().clone(memory_format=torch.contiguous_format) for t in tensors])


def from_device(tensor: DeviceTensor) -> list[Tensor]:
    """A copy of every rank's tensor."""
    return [shard.clone() for shard in tensor.shards]


@torch.no_grad()
def write(tensor: DeviceTensor, values: Sequence[Tensor]) -> None:
    """Overwrite every rank's tensor."""
    for shard, value in zip(tensor.shards, values, strict=True):
        if shard.shape != value.shape:
            raise ValueError(f"cannot write {tuple(value.shape)} into a device tensor of {tuple(shard.shape)}")
        shard.copy_(value)


def cut(tensor: DeviceTensor, dim: int, start: int, end: int, step: int) -> DeviceTensor:
    """A slice that shares the tensor's memory."""
    index = [slice(None)] * len(tensor.shape)
    index[dim] = slice(start, end, step)
    return DeviceTensor([shard[tuple(index)] for shard in tensor.shards])


def to_core(tensor: Tensor, ordinal: int = 0) -> DeviceTensor:
    """Copy a tensor to one core."""
    return to_device([tensor])


def from_core(tensor: DeviceTensor) -> Tensor:
    """A copy of one core's tensor."""
    return from_device(tensor)[0]
