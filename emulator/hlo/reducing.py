"""Instructions that contract, reduce or sort."""

from __future__ import annotations

import functools
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
    "and": lambda x, dims: _one_by_one(_all_bits, x, dims),
    "or": lambda x, dims: _one_by_one(_any_bits, x, dims),
}
_IDENTITIES = {"add": 0.0, "maximum": -math.inf, "minimum": math.inf, "multiply": 1.0}
PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "multiply": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
}


def _one_by_one(reduce: Callable[..., Tensor], x: Tensor, dims: list[int]) -> Tensor:
    for dim in sorted(dims, reverse=True):
        x = reduce(x, dim).to(x.dtype)
    return x


def _all_bits(x: Tensor, dim: int) -> Tensor:
    return x.all(dim) if x.dtype is torch.bool else ~_any_bits(~x, dim)


def _any_bits(x: Tensor, dim: int) -> Tensor:
    if x.dtype is torch.bool:
        return x.any(dim)
    return functools.reduce(torch.bitwise_or, x.unbind(dim), x.new_zeros([*x.shape[:dim], *x.shape[dim + 1 :]]))


@local("dot")
def _dot(node: Node) -> Function:
    """Float dots accumulate in float32, whatever the operands' type, and round once to the result's type."""
    n = node.proto.dot_dimension_numbers
    left = _arrange(node.sizes_of(0), list(n.lhs_batch_dimensions), list(n.lhs_contracting_dimensions), False)
    right = _arrange(node.sizes_of(1), list(n.rhs_batch_dimensions), list(n.rhs_contracting_dimensions), True)
    sizes, dtype = node.sizes, node.dtype
    same_type = {o.element_type for o in node.operands} == {node.proto.shape.element_type}

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return torch.matmul(left(a), right(b)).reshape(sizes)

    def mixed_dot(a: Tensor, b: Tensor) -> Tensor:
        common = torch.promote_types(torch.promote_types(a.dtype, b.dtype), dtype)
        return dot(a.to(common), b.to(common)).to(dtype)

    return dot if same_type and node.mask is None else node.wrap(mixed_dot)


def _arrange(sizes: tuple[int, ...], batch: list[int], contracted: list[int], right: bool) -> Callable[[Tensor], Any]:
    """Return a function that brings an operand of ``dot`` into the form of a (batched) matrix.

    The left operand becomes [batch, free, contracted], the right one [batch, contracted, free].
    """
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
        raise node.unsupported("it has more than one operand")
    opcode, dims = node.applied_opcode(), list(node.proto.dimensions)
    if opcode not in _REDUCTIONS:
        raise node.unsupported(f"it applies {opcode}")
    reduction, combine, init = _REDUCTIONS[opcode], PAIRWISE[opcode], node.constants[1]
    if not dims:
        return combine
    if init is not None and float(init) == _IDENTITIES.get(opcode):
        return node.wrap(lambda x, _: reduction(x, dims))
    return node.wrap(lambda x, start: combine(reduction(x, dims), start))


@local("reduce-window")
def _reduce_window(node: Node) -> Function:
    opcode, window = node.applied_opcode(), node.proto.window.dimensions
    if opcode not in _REDUCTIONS or any(d.window_dilation > 1 or d.base_dilation > 1 for d in window):
        raise node.unsupported(f"it applies {opcode}, or its window is dilated")
    sizes = node.sizes_of(0)
    padded_sizes = [size + d.padding_low + d.padding_high for size, d in zip(sizes, window, strict=True)]
    interior = tuple(slice(d.padding_low, d.padding_low + size) for size, d in zip(sizes, window, strict=True))

    def reduce_window(x: Tensor, start: Tensor) -> Tensor:
        padded = start.expand(padded_sizes).clone(memory_format=torch.contiguous_format)
        padded[interior] = x
        for dim, d in enumerate(window):
            padded = padded.unfold(dim, d.size, d.stride or 1)
        dims = len(padded_sizes)
        return PAIRWISE[opcode](_REDUCTIONS[opcode](padded, list(range(dims, 2 * dims))), start)

    return node.wrap(reduce_window)


@local("sort")
def _sort(node: Node) -> Function:
    """Sort by the first operand, stable, ascending or descending; the other operands are permuted with it."""
    comparison, (dim,) = node.applied_opcode(), node.proto.dimensions
    if comparison not in ("LT", "GT"):
        raise node.unsupported(f"it compares by {comparison}")

    def sort(*values: Tensor) -> Any:
        order = torch.sort(values[0], dim=dim, descending=comparison == "GT", stable=True).indices
        ordered = tuple(v.gather(dim, order) for v in values)
        return ordered[0] if len(ordered) == 1 else ordered

    return sort


@local("batch-norm-training")
def _batch_norm_training(node: Node) -> Function:
    """Return the normalised operand, and the mean and variance over all dimensions but the feature dimension."""
    feature, epsilon = node.proto.feature_index, node.proto.epsilon

    def batch_norm(x: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dims = [d for d in range(x.ndim) if d != feature]
        along = [-1 if d == feature else 1 for d in range(x.ndim)]
        variance, mean = torch.var_mean(x, dims, correction=0)
        normalised = (x - mean.reshape(along)) * torch.rsqrt(variance.reshape(along) + epsilon)
        return normalised * scale.reshape(along) + offset.reshape(along), mean, variance

    return batch_norm
