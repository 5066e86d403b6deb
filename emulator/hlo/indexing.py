"""Gather and scatter: windows of a tensor at positions that other tensors hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neuronmm.emulator.hlo.node import IN_PLACE, Function, Node, local
from neuronmm.emulator.hlo.shaping import indices_of_window


def _positions(indices: Tensor, vector_dimension: int) -> Tensor:
    """``indices`` with the components of a position last; an implicit dimension of 1 made explicit."""
    wide = indices.to(torch.int64)
    return wide.unsqueeze(-1) if vector_dimension == wide.ndim else wide.movedim(vector_dimension, -1)


def _spread(positions: Tensor, dimensions: list[int], rank: int) -> list[Any]:
    """The start of each window along each dimension of the operand; None: 0."""
    starts: list[Any] = [None] * rank
    for component, dimension in enumerate(dimensions):
        starts[dimension] = positions[..., component]
    return starts


@local("gather")
def _gather(node: Node) -> Function:
    """Starts out of range are moved so that the window fits."""
    numbers, windows = node.proto.gather_dimension_numbers, tuple(node.proto.gather_slice_sizes)
    sizes, mapped = node.sizes_of(0), list(numbers.start_index_map)
    collapsed, offsets = list(numbers.collapsed_slice_dims), list(numbers.offset_dims)
    vector = numbers.index_vector_dim
    kept = [d for d in range(len(sizes)) if d not in collapsed]
    rank = len(node.sizes)
    batch = [d for d in range(rank) if d not in offsets]
    order = [0] * rank
    for number, dimension in enumerate([*batch, *offsets]):
        order[dimension] = number
    whole = all(windows[d] == sizes[d] for d in kept)
    if whole and len(mapped) == 1 and collapsed == mapped and len(batch) == 1:
        (dimension,), moved = mapped, batch[0]
        last = sizes[dimension] - 1

        def select(x: Tensor, indices: Tensor) -> Tensor:
            return x.index_select(dimension, indices.flatten().clamp(0, last)).movedim(dimension, moved)

        return select

    def gather(x: Tensor, indices: Tensor) -> Tensor:
        starts = _spread(_positions(indices, vector), mapped, len(sizes))
        starts = [s if s is None else s.clamp(0, sizes[d] - windows[d]) for d, s in enumerate(starts)]
        return x[indices_of_window(sizes, kept, windows, starts)].permute(order)

    return gather


def _scatter(node: Node) -> Function:
    """A window that does not fit is left out."""
    if len(node.operands) != 3:
        raise node.unsupported("more than one operand")
    how = node.applied()
    if how not in ("second", "add", "maximum", "minimum", "multiply"):
        raise node.unsupported(f"to apply {how}")
    numbers = node.proto.scatter_dimension_numbers
    sizes, updates = node.sizes, node.sizes_of(2)
    inserted, window_dimensions = list(numbers.inserted_window_dims), list(numbers.update_window_dims)
    mapped, vector = list(numbers.scatter_dims_to_operand_dims), numbers.index_vector_dim
    kept = [d for d in range(len(sizes)) if d not in inserted]
    windows = [1] * len(sizes)
    for dimension, window in zip(kept, window_dimensions, strict=True):
        windows[dimension] = updates[window]
    order = [d for d in range(len(updates)) if d not in window_dimensions] + window_dimensions
    rows = how == "second" and mapped == inserted == [0] and tuple(windows[1:]) == sizes[1:]
    plain = rows and window_dimensions == list(range(1, len(updates)))

    def scatter(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        positions = _positions(indices, vector)
        limits = torch.tensor([sizes[d] - windows[d] for d in mapped])
        fits = ((positions >= 0) & (positions <= limits)).all(-1)
        if plain and bool(fits.all()):
            return x.index_copy_(0, positions.flatten(), values)
        picked = values.permute(order)[fits]
        at = indices_of_window(sizes, kept, tuple(windows), _spread(positions[fits], mapped, len(sizes)))
        if how == "second":
            x[at] = picked
        elif how == "add":
            x.index_put_(at, picked, accumulate=True)
        else:
            _reduce_into(x, at, picked, {"maximum": "amax", "minimum": "amin", "multiply": "prod"}[how])
        return x

    return scatter


def _reduce_into(x: Tensor, at: tuple[Tensor, ...], values: Tensor, how: str) -> None:
    flat = torch.zeros((), dtype=torch.int64)
    for index, stride in zip(at, torch.empty(x.shape, device="meta").stride(), strict=True):
        flat = flat + index * stride
    reduced = x.flatten().scatter_reduce(0, flat.expand(values.shape).flatten(), values.flatten(), how)
    x.copy_(reduced.reshape(x.shape))


IN_PLACE["scatter"] = _scatter
