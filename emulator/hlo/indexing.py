"""Gather and scatter: windows of a tensor at positions that another tensor gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neuronmm.emulator.hlo.node import IN_PLACE, Function, Node, local


def _positions(indices: Tensor, vector_dimension: int) -> Tensor:
    """Return ``indices`` as int64 with the index-vector dimension last; it may be an implicit dimension of 1."""
    indices = indices.to(torch.int64)
    return indices.unsqueeze(-1) if vector_dimension == indices.ndim else indices.movedim(vector_dimension, -1)


def _starts(positions: Tensor, dimensions: list[int], count: int) -> list[Any]:
    """Return the windows' starts along each of the operand's ``count`` dimensions; None where they are all 0."""
    starts: list[Any] = [None] * count
    for component, dimension in enumerate(dimensions):
        starts[dimension] = positions[..., component]
    return starts


def _window_indices(sizes: tuple[int, ...], window_dims: list[int], windows: tuple[int, ...], starts: list[Any]) -> Any:
    """Return advanced indices that select the windows of a tensor.

    Args:
        sizes: the tensor's dimensions.
        window_dims: dimensions that stay in the result, after the batch dimensions; other windows have size 1.
        windows: the window's size along every dimension.
        starts: the windows' starts along every dimension, as :func:`_starts` returns them.
    """
    batch = next((s.ndim for s in starts if s is not None), 0)
    indices = []
    for dimension in range(len(sizes)):
        index = torch.zeros((1,) * (batch + len(window_dims)), dtype=torch.int64)
        if starts[dimension] is not None:
            index = index + starts[dimension].reshape(*starts[dimension].shape, *[1] * len(window_dims))
        if dimension in window_dims:
            along = [1] * (batch + len(window_dims))
            along[batch + window_dims.index(dimension)] = windows[dimension]
            index = index + torch.arange(windows[dimension]).reshape(along)
        indices.append(index)
    return tuple(indices)


@local("gather")
def _gather(node: Node) -> Function:
    """A start out of range is moved so that the window fits."""
    numbers, windows = node.proto.gather_dimension_numbers, tuple(node.proto.gather_slice_sizes)
    sizes, mapped = node.sizes_of(0), list(numbers.start_index_map)
    collapsed, offsets = list(numbers.collapsed_slice_dims), list(numbers.offset_dims)
    vector = numbers.index_vector_dim
    window_dims = [d for d in range(len(sizes)) if d not in collapsed]
    count = len(node.sizes)
    batch = [d for d in range(count) if d not in offsets]
    order = [0] * count
    for number, dimension in enumerate([*batch, *offsets]):
        order[dimension] = number
    full_windows = all(windows[d] == sizes[d] for d in window_dims)
    if full_windows and len(mapped) == 1 and collapsed == mapped and len(batch) == 1:
        (dimension,), batch_dimension = mapped, batch[0]
        last = sizes[dimension] - 1

        def select(x: Tensor, indices: Tensor) -> Tensor:
            return x.index_select(dimension, indices.flatten().clamp(0, last)).movedim(dimension, batch_dimension)

        return select

    def gather(x: Tensor, indices: Tensor) -> Tensor:
        starts = _starts(_positions(indices, vector), mapped, len(sizes))
        starts = [s if s is None else s.clamp(0, sizes[d] - windows[d]) for d, s in enumerate(starts)]
        return x[_window_indices(sizes, window_dims, windows, starts)].permute(order)

    return gather


_SCATTER_REDUCTIONS = {"add": "sum", "maximum": "amax", "minimum": "amin", "multiply": "prod"}
"""Opcode of the applied computation -> torch's name of the reduction."""


def _scatter(node: Node) -> Function:
    """A window that does not fit is skipped."""
    if len(node.operands) != 3:
        raise node.unsupported("it has more than one operand")
    opcode = node.applied_opcode()
    if opcode not in ("second", *_SCATTER_REDUCTIONS):
        raise node.unsupported(f"it applies {opcode}")
    numbers = node.proto.scatter_dimension_numbers
    sizes, update_sizes = node.sizes, node.sizes_of(2)
    inserted, window_dimensions = list(numbers.inserted_window_dims), list(numbers.update_window_dims)
    mapped, vector = list(numbers.scatter_dims_to_operand_dims), numbers.index_vector_dim
    window_dims = [d for d in range(len(sizes)) if d not in inserted]
    windows = [1] * len(sizes)
    for dimension, window in zip(window_dims, window_dimensions, strict=True):
        windows[dimension] = update_sizes[window]
    order = [d for d in range(len(update_sizes)) if d not in window_dimensions] + window_dimensions
    rows = opcode == "second" and mapped == inserted == [0] and tuple(windows[1:]) == sizes[1:]
    contiguous_rows = rows and window_dimensions == list(range(1, len(update_sizes)))

    def scatter(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        positions = _positions(indices, vector)
        limits = torch.tensor([sizes[d] - windows[d] for d in mapped])
        fits = ((positions >= 0) & (positions <= limits)).all(-1)
        if contiguous_rows and bool(fits.all()):
            return x.index_copy_(0, positions.flatten(), values)
        updates = values.permute(order)[fits]
        targets = _window_indices(sizes, window_dims, tuple(windows), _starts(positions[fits], mapped, len(sizes)))
        if opcode == "second":
            x[targets] = updates
        elif opcode == "add":
            x.index_put_(targets, updates, accumulate=True)
        else:
            _reduce_into(x, targets, updates, _SCATTER_REDUCTIONS[opcode])
        return x

    return scatter


def _reduce_into(x: Tensor, targets: tuple[Tensor, ...], values: Tensor, reduction: str) -> None:
    flat = torch.zeros((), dtype=torch.int64)
    for index, stride in zip(targets, torch.empty(x.shape, device="meta").stride(), strict=True):
        flat = flat + index * stride
    reduced = x.flatten().scatter_reduce(0, flat.expand(values.shape).flatten(), values.flatten(), reduction)
    x.copy_(reduced.reshape(x.shape))


IN_PLACE["scatter"] = _scatter
