"""Instructions that create values or rearrange elements; most return views."""

from __future__ import annotations

import torch
from torch import Tensor

from neuronmm.emulator.hlo.node import IN_PLACE, Function, Node, local
from neuronmm.emulator.pyhlo.literal import tensor_of


@local("constant")
def _constant(node: Node) -> Function:
    value = tensor_of(node.proto.literal).to(node.dtype).reshape(node.sizes)
    return lambda: value


@local("iota")
def _iota(node: Node) -> Function:
    (dimension,) = node.proto.dimensions
    sizes, dtype = node.sizes, node.dtype
    along = [sizes[d] if d == dimension else 1 for d in range(len(sizes))]
    return lambda: torch.arange(sizes[dimension]).to(dtype).reshape(along).expand(sizes)


@local("broadcast", view=True)
def _broadcast(node: Node) -> Function:
    sizes, dimensions = node.sizes, list(node.proto.dimensions)
    aligned = [1] * len(sizes)
    for dimension, size in zip(dimensions, node.sizes_of(0), strict=True):
        aligned[dimension] = size
    order = sorted(range(len(dimensions)), key=dimensions.__getitem__)
    if order != list(range(len(order))):
        return lambda x: x.permute(order).reshape(aligned).expand(sizes)
    if len(aligned) == len(dimensions):
        return lambda x: x.expand(sizes)
    return lambda x: x.reshape(aligned).expand(sizes)


@local("reshape", view=True)
def _reshape(node: Node) -> Function:
    sizes = node.sizes
    return lambda x: x.reshape(sizes)


@local("transpose", view=True)
def _transpose(node: Node) -> Function:
    dimensions = list(node.proto.dimensions)
    return lambda x: x.permute(dimensions)


@local("slice", view=True)
def _slice(node: Node) -> Function:
    slices = tuple(slice(d.start, d.limit, d.stride or 1) for d in node.proto.slice_dimensions)
    partial = [d for d, (s, size) in enumerate(zip(slices, node.sizes_of(0), strict=True)) if s != slice(0, size, 1)]
    if len(partial) == 1 and slices[partial[0]].step == 1:
        (dimension,) = partial
        start, length = slices[dimension].start, node.sizes[dimension]
        return lambda x: x.narrow(dimension, start, length)
    return lambda x: x[slices]


@local("reverse")
def _reverse(node: Node) -> Function:
    dimensions = list(node.proto.dimensions)
    return lambda x: x.flip(dimensions)


@local("concatenate")
def _concatenate(node: Node) -> Function:
    (dimension,) = node.proto.dimensions
    return lambda *parts: torch.cat(parts, dimension)


@local("pad")
def _pad(node: Node) -> Function:
    """Interior padding goes between elements; negative edge padding removes elements."""
    sizes, dimensions = node.sizes, node.proto.padding_config.dimensions
    target, source = [], []
    for size, length, d in zip(sizes, node.sizes_of(0), dimensions, strict=True):
        step = d.interior_padding + 1
        visible = [i for i in range(length) if 0 <= d.edge_padding_low + i * step < size]
        first, last = (visible[0], visible[-1]) if visible else (0, -1)
        source.append(slice(first, last + 1))
        start = d.edge_padding_low + first * step
        target.append(slice(start, start + (last - first) * step + 1, step) if visible else slice(0, 0))

    def pad(x: Tensor, value: Tensor) -> Tensor:
        result = value.expand(sizes).clone(memory_format=torch.contiguous_format)
        result[tuple(target)] = x[tuple(source)]
        return result

    return pad


def _window(indices: tuple[Tensor, ...], sizes: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices of a dynamic slice; a start out of range is moved so that the slice fits."""
    slices = []
    for index, size, length in zip(indices, sizes, lengths, strict=True):
        start = min(max(int(index), 0), size - length)
        slices.append(slice(start, start + length))
    return tuple(slices)


@local("dynamic-slice", view=True)
def _dynamic_slice(node: Node) -> Function:
    lengths, sizes = tuple(node.proto.dynamic_slice_sizes), node.sizes_of(0)
    return lambda x, *indices: x[_window(indices, sizes, lengths)]


def _dynamic_update_slice(node: Node) -> Function:
    sizes, lengths = node.sizes, node.sizes_of(1)

    def dynamic_update_slice(x: Tensor, update: Tensor, *indices: Tensor) -> Tensor:
        x[_window(indices, sizes, lengths)] = update
        return x

    return dynamic_update_slice


IN_PLACE["dynamic-update-slice"] = _dynamic_update_slice


@local("tuple")
def _tuple(node: Node) -> Function:
    return lambda *values: values


@local("get-tuple-element", view=True)
def _get_tuple_element(node: Node) -> Function:
    index = node.proto.tuple_index
    return lambda values: values[index]


@local("rng")
def _rng(node: Node) -> Function:
    """Draw from torch's generator: uniform in [a, b), or normal with mean a and standard deviation b."""
    sizes, dtype, normal = node.sizes, node.dtype, node.proto.distribution == 2

    def rng(a: Tensor, b: Tensor) -> Tensor:
        if normal:
            return torch.randn(sizes).mul(b).add(a).to(dtype)
        return torch.rand(sizes).mul(b - a).add(a).to(dtype)

    return rng
