"""Instructions that work element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from neuronmm.emulator.hlo.node import Function, Node, local

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "cbrt": lambda x: torch.sign(x) * torch.abs(x) ** (1 / 3),
    "ceil": torch.ceil,
    "cosine": torch.cos,
    "exponential": torch.exp,
    "exponential-minus-one": torch.expm1,
    "floor": torch.floor,
    "log": torch.log,
    "log-plus-one": torch.log1p,
    "logistic": torch.sigmoid,
    "negate": torch.neg,
    "not": torch.bitwise_not,
    "round-nearest-even": torch.round,
    "rsqrt": torch.rsqrt,
    "sign": lambda x: torch.where(x != x, x, torch.sign(x)),
    "sine": torch.sin,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "and": torch.bitwise_and,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "multiply": torch.mul,
    "or": torch.bitwise_or,
    "power": torch.pow,
    "subtract": torch.sub,
    "xor": torch.bitwise_xor,
}
COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "EQ": torch.eq,
    "NE": torch.ne,
    "LT": torch.lt,
    "LE": torch.le,
    "GT": torch.gt,
    "GE": torch.ge,
}


@local(*_UNARY)
def _unary(node: Node) -> Function:
    return node.wrap(_UNARY[node.proto.opcode])


@local(*_BINARY)
def _binary(node: Node) -> Function:
    if node.dtype is torch.bool:
        logical: dict[str, Any] = {"add": torch.logical_or, "maximum": torch.logical_or, "multiply": torch.logical_and}
        logical["minimum"] = torch.logical_and
        return logical.get(node.proto.opcode, _BINARY[node.proto.opcode])
    return node.wrap(_BINARY[node.proto.opcode])


@local("divide")
def _divide(node: Node) -> Function:
    """Integer division truncates; division by zero gives -1 (all bits set)."""
    if node.dtype.is_floating_point:
        return torch.div

    def divide(a: Tensor, b: Tensor) -> Tensor:
        quotient = torch.div(a, torch.where(b == 0, torch.ones_like(b), b), rounding_mode="trunc")
        return torch.where(b == 0, torch.full_like(a, -1), quotient)

    return node.wrap(divide)


@local("remainder")
def _remainder(node: Node) -> Function:
    """The result has the dividend's sign; modulo zero is the dividend for integers, NaN for floats."""
    if node.dtype.is_floating_point:
        return torch.fmod
    return lambda a, b: torch.where(b == 0, a, torch.fmod(a, torch.where(b == 0, torch.ones_like(b), b)))


@local("shift-left", "shift-right-logical", "shift-right-arithmetic")
def _shift(node: Node) -> Function:
    bits = torch.iinfo(node.dtype).bits if node.mask is None else node.mask.bit_length()
    opcode = node.proto.opcode

    def shift(a: Tensor, b: Tensor) -> Tensor:
        in_range = (b >= 0) & (b < bits)
        distance = torch.where(in_range, b, torch.zeros_like(b))
        if opcode == "shift-left":
            return torch.where(in_range, a << distance, torch.zeros_like(a))
        if opcode == "shift-right-arithmetic":
            return torch.where(in_range, a >> distance, torch.where(a < 0, -1, 0).to(a.dtype))
        low_bits = torch.where(distance > 0, (1 << (bits - distance)) - 1, torch.full_like(a, -1)).to(a.dtype)
        return torch.where(in_range, (a >> distance) & low_bits, torch.zeros_like(a))

    return node.wrap(shift)


@local("compare")
def _compare(node: Node) -> Function:
    return COMPARISONS[node.proto.comparison_direction]


@local("select")
def _select(node: Node) -> Function:
    return torch.where


@local("clamp")
def _clamp(node: Node) -> Function:
    return lambda low, x, high: torch.minimum(torch.maximum(x, low), high)


@local("convert", view=True)
def _convert(node: Node) -> Function:
    """Float to integer truncates and saturates, and NaN gives 0; integer to integer wraps."""
    dtype, mask = node.dtype, node.mask
    if dtype.is_floating_point or dtype is torch.bool:
        return lambda x: x.to(dtype)
    largest = mask or torch.iinfo(dtype).max
    smallest = 0 if mask else torch.iinfo(dtype).min

    def convert(x: Tensor) -> Tensor:
        if x.dtype.is_floating_point:
            return _saturate(x, smallest, largest, dtype)
        return x.to(dtype) if mask is None else x.to(torch.int64).bitwise_and(mask).to(dtype)

    return convert


def _saturate(x: Tensor, smallest: int, largest: int, dtype: torch.dtype) -> Tensor:
    truncated = torch.nan_to_num(x.double(), nan=0.0).trunc()
    result = truncated.clamp(float(smallest), float(min(largest, 2**62))).to(torch.int64)
    result = torch.where(truncated >= float(largest), torch.full_like(result, min(largest, 2**63 - 1)), result)
    return result.to(dtype)
