"""Tensors in the memory of emulated NeuronCores, and their operators in ``torch.ops.neuron``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DeviceTensor:
    """One tensor per rank, all of one shape and dtype; ``shards[rank]`` is in that core's memory."""

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
    """Copy one tensor per rank to the device.

    Raises:
        ValueError: the ranks' shapes or dtypes differ.
    """
    if len({(t.shape, t.dtype) for t in tensors}) != 1:
        raise ValueError(
            f"the ranks' tensors must have one shape and dtype, not {[(t.shape, t.dtype) for t in tensors]}"
        )
    return DeviceTensor([t.detach().clone(memory_format=torch.contiguous_format) for t in tensors])


def from_device(tensor: DeviceTensor) -> list[Tensor]:
    """Return a copy of every rank's tensor."""
    return [shard.clone() for shard in tensor.shards]


@torch.no_grad()
def write(tensor: DeviceTensor, values: Sequence[Tensor]) -> None:
    """Overwrite every rank's tensor with its value in ``values``.

    Raises:
        ValueError: the shapes differ.
    """
    for shard, value in zip(tensor.shards, values, strict=True):
        if shard.shape != value.shape:
            raise ValueError(f"cannot write {list(value.shape)} into a device tensor of {list(shard.shape)}")
        shard.copy_(value)


def slice_device(tensor: DeviceTensor, dim: int, start: int, end: int, step: int) -> DeviceTensor:
    """Return a slice that shares the tensor's memory."""
    index = [slice(None)] * len(tensor.shape)
    index[dim] = slice(start, end, step)
    return DeviceTensor([shard[tuple(index)] for shard in tensor.shards])


def to_core(tensor: Tensor, ordinal: int = 0) -> DeviceTensor:
    """Copy a tensor to one core; ``ordinal`` is ignored."""
    return to_device([tensor])


def from_core(tensor: DeviceTensor) -> Tensor:
    """Return a copy of the first core's tensor."""
    return from_device(tensor)[0]
