"""Instructions that contract, reduce and sort."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from neuronmm.emulator.hlo.node import Function, Node, local

_REDUCTIONS: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "add": lambda x, dims: x.sum(dims, dtype=x.dtype),
    "maximum": lambda x, dims: x.amax(dims),
    "minimum": lambda x, dims: x.amin(dims),
    "multiply": lambda x, dims: _one_by_one(torch.Tensor.prod, x, dims),
    "and": lambda x, dims: _one_by_one(torch.Tensor.all, x, dims),
    "or": lambda x, dims: _one_by_one(torch.Tensor.any, x, dims),
}
_IDENTITIES = {"add": 0.0, "maximum": -math.inf, "minimum": math.inf, "multiply": 1.0, "and": 1.0, "or": 0.0}
PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "multiply": torch.mul,
    "and": torch.logical_and,
    "or": torch.logical_or,
}


def _one_by_one(reduce: Callable[..., Tensor], x: Tensor, dims: list[int]) -> Tensor:
    for dim in sorted(dims, reverse=True):
        x = reduce(x, dim).to(x.dtype)
    return x


@local("dot")
def _dot(node: Node) -> Function:
    """Products accumulate in float32, whatever the operands' float type; one rounding to the result's."""
    n = node.proto.dot_dimension_numbers
    left = _arrange(node.sizes_of(0), list(n.lhs_batch_dimensions), list(n.lhs_contracting_dimensions), False)
    right = _arrange(node.sizes_of(1), list(n.rhs_batch_dimensions), list(n.rhs_contracting_dimensions), True)
    sizes, dtype = node.sizes, node.dtype
    same = {o.element_type for o in node.operands} == {node.proto.shape.element_type}

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return torch.matmul(left(a), right(b)).reshape(sizes)

    def widened(a: Tensor, b: Tensor) -> Tensor:
        common = torch.promote_types(torch.promote_types(a.dtype, b.dtype), dtype)
        return dot(a.to(common), b.to(common)).to(dtype)

    return dot if same and node.mask is None else node.wrapped(widened)


def _arrange(sizes: tuple[int, ...], batch: list[int], contracted: list[int], right: bool) -> Callable[[Tensor], Any]:
    """An operand as a (batch of) matrices: [batch, free, contracted], on the right [batch, contracted, free]."""
    free = [d for d in range(len(sizes)) if d not in batch and d not in contracted]
    groups = [batch, contracted, free] if right else [batch, free, contracted]
    order = [d for group in groups for d in group]
    shape = [math.prod(sizes[d] for d in group) for group in groups]
    shape = shape if batch else shape[1:]
    if order == list(range(len(sizes))):
        return (lambda x: x) if list(sizes) == shape else (lambda x: x.reshape(shape))
    if not batch and len(free) == len(contracted) == 1:
        return torch.Tensor.t
    return lambda x: x.permute(order).reshape(shape)


@local("reduce")
def _reduce(node: Node) -> Function:
    if len(node.operands) != 2:
        raise node.unsupported("more than one operand")
    how, dims = node.applied(), list(node.proto.dimensions)
    if how not in _REDUCTIONS:
        raise node.unsupported(f"to apply {how}")
    reduction, combine, init = _REDUCTIONS[how], PAIRWISE[how], node.constants[1]
    if not dims:
        return combine
    if init is not None and float(init) == _IDENTITIES[how]:
        return node.wrapped(lambda x, _: reduction(x, dims))
    return node.wrapped(lambda x, start: combine(reduction(x, dims), start))


@local("reduce-window")
def _reduce_window(node: Node) -> Function:
    how, window = node.applied(), node.proto.window.dimensions
    if how not in _REDUCTIONS or any(d.window_dilation > 1 or d.base_dilation > 1 for d in window):
        raise node.unsupported("a dilated window or another reduction")
    sizes = node.sizes_of(0)
    padded = [size + d.padding_low + d.padding_high for size, d in zip(sizes, window, strict=True)]
    place = tuple(slice(d.padding_low, d.padding_low + size) for size, d in zip(sizes, window, strict=True))

    def reduce_window(x: Tensor, start: Tensor) -> Tensor:
        base = start.expand(padded).clone(memory_format=torch.contiguous_format)
        base[place] = x
        for dim, d in enumerate(window):
            base = base.unfold(dim, d.size, d.stride or 1)
        rank = len(padded)
        return PAIRWISE[how](_REDUCTIONS[how](base, list(range(rank, 2 * rank))), start)

    return node.wrapped(reduce_window)


@local("sort")
def _sort(node: Node) -> Function:
    """By the first operand, ascending or descending, stable; the other operands follow."""
    how, (dim,) = node.applied(), node.proto.dimensions
    if how not in ("LT", "GT"):
        raise node.unsupported(f"to compare by {how}")

    def sort(*values: Tensor) -> Any:
        order = torch.sort(values[0], dim=dim, descending=how == "GT", stable=True).indices
        ordered = tuple(v.gather(dim, order) for v in values)
        return ordered[0] if len(ordered) == 1 else ordered

    return sort


@local("batch-norm-training")
def _batch_norm_training(node: Node) -> Function:
    """Normalised, mean and variance over all dimensions but one."""
    feature, epsilon = node.proto.feature_index, node.proto.epsilon

    def batch_norm(x: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dims = [d for d in range(x.ndim) if d != feature]
        along = [-1 if d == feature else 1 for d in range(x.ndim)]
        variance, mean = torch.var_mean(x, dims, correction=0)
        normal = (x - mean.reshape(along)) * torch.rsqrt(variance.reshape(along) + epsilon)
        return normal * scale.reshape(along) + offset.reshape(along), mean, variance

    return batch_norm
