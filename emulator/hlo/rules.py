"""Type rules of instructions that work element by element, create values, or rearrange elements."""

from __future__ import annotations

import math

from neuronmm.emulator.hlo.elementwise import COMPARISONS
from neuronmm.emulator.hlo.types import FLOATS, INTEGERS, PRED, Instruction, Type, rule, tuple_of

_FLOAT_UNARY = (
    "cbrt", "ceil", "cosine", "exponential", "exponential-minus-one", "floor", "log", "log-plus-one", "logistic",
    "round-nearest-even", "rsqrt", "sine", "sqrt", "tanh",
)  # fmt: skip


@rule(*_FLOAT_UNARY)
def _float_unary(op: Instruction) -> Type:
    (x,) = op.take(1)
    op.require(x.element in FLOATS, "it takes floats")
    return x


@rule("abs", "negate", "sign")
def _numeric_unary(op: Instruction) -> Type:
    (x,) = op.take(1)
    op.require(x.element in FLOATS | INTEGERS, "it takes numbers")
    return x


@rule("not")
def _not(op: Instruction) -> Type:
    (x,) = op.take(1)
    op.require(x.element in {PRED.element} | INTEGERS, "it takes integers or booleans")
    return x


def _pair(op: Instruction) -> Type:
    x, y = op.take(2)
    op.require(x == y, "both operands must have the same type; nothing is promoted or broadcast")
    return x


@rule("add", "maximum", "minimum", "multiply")
def _binary(op: Instruction) -> Type:
    return _pair(op)


@rule("divide", "power", "remainder", "subtract")
def _arithmetic(op: Instruction) -> Type:
    x = _pair(op)
    op.require(x.element in FLOATS | INTEGERS, "it takes numbers")
    return x


@rule("and", "or", "xor")
def _logical(op: Instruction) -> Type:
    x = _pair(op)
    op.require(x.element in {PRED.element} | INTEGERS, "it takes integers or booleans")
    return x


@rule("shift-left", "shift-right-arithmetic", "shift-right-logical")
def _shift(op: Instruction) -> Type:
    x = _pair(op)
    op.require(x.element in INTEGERS, "it takes integers")
    return x


@rule("compare")
def _compare(op: Instruction) -> Type:
    direction = op.proto.comparison_direction
    op.require(direction in COMPARISONS, f"it compares by {direction!r}, not by one of {', '.join(COMPARISONS)}")
    return PRED.resized(_pair(op).sizes)


@rule("select")
def _select(op: Instruction) -> Type:
    predicate, x, y = op.take(3)
    op.require(x == y, "both values must have the same type")
    op.require(predicate in (PRED, PRED.resized(x.sizes)), "it selects by one boolean, or by one per element")
    return x


@rule("clamp")
def _clamp(op: Instruction) -> Type:
    low, x, high = op.take(3)
    valid = all(bound in (x, x.scalar) for bound in (low, high))
    op.require(valid, "a bound must be a scalar or have the value's type")
    return x


@rule("convert")
def _convert(op: Instruction) -> Type:
    (x,) = op.take(1)
    return op.declared.resized(x.sizes)


@rule("constant")
def _constant(op: Instruction) -> Type:
    op.take(0)
    return Type.of(op.proto.literal.shape)


@rule("parameter")
def _parameter(op: Instruction) -> Type:
    op.take(0)
    return op.declared


@rule("iota")
def _iota(op: Instruction) -> Type:
    op.take(0)
    op.require(len(op.proto.dimensions) == 1, "it must count along one dimension")
    op.require_dimensions(op.proto.dimensions, len(op.declared.sizes))
    return op.declared


@rule("rng")
def _rng(op: Instruction) -> Type:
    low, high = op.take(2)
    op.require(low == high == op.declared.scalar, "both parameters must be scalars of the result's element type")
    return op.declared


@rule("broadcast")
def _broadcast(op: Instruction) -> Type:
    (x,) = op.take(1)
    mapping = op.require_dimensions(op.proto.dimensions, len(op.declared.sizes))
    op.require(len(mapping) == len(x.sizes), "it must map every dimension of the operand")
    sizes = list(op.declared.sizes)
    for dimension, size in zip(mapping, x.sizes, strict=True):
        sizes[dimension] = size
    return x.resized(sizes)


@rule("reshape")
def _reshape(op: Instruction) -> Type:
    (x,) = op.take(1)
    op.require(math.prod(x.sizes) == math.prod(op.declared.sizes), "the number of elements changes")
    return x.resized(op.declared.sizes)


@rule("transpose")
def _transpose(op: Instruction) -> Type:
    (x,) = op.take(1)
    order = op.require_dimensions(op.proto.dimensions, len(x.sizes))
    op.require(len(order) == len(x.sizes), "it must name every dimension once")
    return x.resized([x.sizes[d] for d in order])


@rule("slice")
def _slice(op: Instruction) -> Type:
    (x,) = op.take(1)
    slices = op.proto.slice_dimensions
    op.require(len(slices) == len(x.sizes), "it must slice every dimension")
    for bounds, size in zip(slices, x.sizes, strict=True):
        valid = 0 <= bounds.start <= bounds.limit <= size and bounds.stride > 0
        op.require(valid, f"slice {bounds.start}:{bounds.limit}:{bounds.stride} of a dimension of {size}")
    return x.resized([-(-(bounds.limit - bounds.start) // bounds.stride) for bounds in slices])


@rule("reverse")
def _reverse(op: Instruction) -> Type:
    (x,) = op.take(1)
    op.require_dimensions(op.proto.dimensions, len(x.sizes))
    return x


@rule("concatenate")
def _concatenate(op: Instruction) -> Type:
    op.require(bool(op.operands), "it takes at least one operand")
    first = op.operands[0]
    op.require(len(op.proto.dimensions) == 1, "it must join along one dimension")
    (dimension,) = op.require_dimensions(op.proto.dimensions, len(first.sizes))

    def with_size(x: Type, size: int) -> Type:
        return x.resized([*x.sizes[:dimension], size, *x.sizes[dimension + 1 :]])

    total = 0
    for x in op.operands:
        op.require(len(x.sizes) == len(first.sizes), "the operands' ranks differ")
        op.require(with_size(x, 0) == with_size(first, 0), f"the operands differ in more than dimension {dimension}")
        total += x.sizes[dimension]
    return with_size(first, total)


@rule("pad")
def _pad(op: Instruction) -> Type:
    x, value = op.take(2)
    edges = op.proto.padding_config.dimensions
    op.require(value == x.scalar, "the padding value must be a scalar of the operand's element type")
    op.require(len(edges) == len(x.sizes), "it must pad every dimension")
    sizes = [
        edge.edge_padding_low + size + max(size - 1, 0) * edge.interior_padding + edge.edge_padding_high
        for edge, size in zip(edges, x.sizes, strict=True)
    ]
    op.require(all(edge.interior_padding >= 0 for edge in edges), "interior padding is negative")
    op.require(min(sizes, default=0) >= 0, "a padded size is negative")
    return x.resized(sizes)


def _check_window(op: Instruction, x: Type, starts: list[Type], window: list[int]) -> None:
    valid = len(set(starts)) <= 1 and all(start.element in INTEGERS and not start.sizes for start in starts)
    valid = valid and len(starts) == len(x.sizes)
    op.require(valid, "it takes one start per dimension, integer scalars of one type")
    fits = len(window) == len(x.sizes) and all(a <= b for a, b in zip(window, x.sizes, strict=False))
    op.require(fits, "the window does not fit the operand")


@rule("dynamic-slice")
def _dynamic_slice(op: Instruction) -> Type:
    op.require(bool(op.operands), "it takes an operand and its starts")
    x, *starts = op.operands
    _check_window(op, x, starts, list(op.proto.dynamic_slice_sizes))
    return x.resized(op.proto.dynamic_slice_sizes)


@rule("dynamic-update-slice")
def _dynamic_update_slice(op: Instruction) -> Type:
    op.require(len(op.operands) >= 2, "it takes an operand, an update and its starts")
    x, update, *starts = op.operands
    op.require(update.element == x.element, "the update has another element type")
    _check_window(op, x, starts, list(update.sizes))
    return x


@rule("tuple")
def _tuple(op: Instruction) -> Type:
    return tuple_of(*op.operands)


@rule("get-tuple-element")
def _get_tuple_element(op: Instruction) -> Type:
    (values,) = op.take(1)
    op.require(0 <= op.proto.tuple_index < len(values.parts), f"there is no element {op.proto.tuple_index}")
    element: Type = values.parts[op.proto.tuple_index]
    return element
