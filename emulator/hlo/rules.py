"""Type rules of instructions that work element by element, and of those that make, move and cut."""

from __future__ import annotations

import math

from neuronmm.emulator.hlo.types import FLOATS, INTEGERS, PRED, Type, Use, rule, tuple_of

_FLOAT_UNARY = (
    "cbrt", "ceil", "cosine", "exponential", "exponential-minus-one", "floor", "log", "log-plus-one", "logistic",
    "round-nearest-even", "rsqrt", "sine", "sqrt", "tanh",
)  # fmt: skip


@rule(*_FLOAT_UNARY)
def _float_unary(use: Use) -> Type:
    (x,) = use.take(1)
    use.need(x.element in FLOATS, "it takes floats")
    return x


@rule("abs", "negate", "sign")
def _numeric_unary(use: Use) -> Type:
    (x,) = use.take(1)
    use.need(x.element in FLOATS | INTEGERS, "it takes numbers")
    return x


@rule("not")
def _not(use: Use) -> Type:
    (x,) = use.take(1)
    use.need(x.element in {PRED.element} | INTEGERS, "it takes integers or booleans")
    return x


def _pair(use: Use) -> Type:
    x, y = use.take(2)
    use.need(x == y, "both operands have to be of one type; nothing is promoted or broadcast")
    return x


@rule("add", "maximum", "minimum", "multiply")
def _binary(use: Use) -> Type:
    return _pair(use)


@rule("divide", "power", "remainder", "subtract")
def _arithmetic(use: Use) -> Type:
    x = _pair(use)
    use.need(x.element in FLOATS | INTEGERS, "it takes numbers")
    return x


@rule("and", "or", "xor")
def _logical(use: Use) -> Type:
    x = _pair(use)
    use.need(x.element in {PRED.element} | INTEGERS, "it takes integers or booleans")
    return x


@rule("shift-left", "shift-right-arithmetic", "shift-right-logical")
def _shift(use: Use) -> Type:
    x = _pair(use)
    use.need(x.element in INTEGERS, "it takes integers")
    return x


@rule("compare")
def _compare(use: Use) -> Type:
    return PRED.resized(_pair(use).sizes)


@rule("select")
def _select(use: Use) -> Type:
    which, x, y = use.take(3)
    use.need(x == y, "both values have to be of one type")
    use.need(which in (PRED, PRED.resized(x.sizes)), "it selects by one boolean, or by one for each element")
    return x


@rule("clamp")
def _clamp(use: Use) -> Type:
    low, x, high = use.take(3)
    use.need(all(bound in (x, x.scalar) for bound in (low, high)), "a bound is a scalar, or of the value's type")
    return x


@rule("convert")
def _convert(use: Use) -> Type:
    (x,) = use.take(1)
    return use.declared.resized(x.sizes)


@rule("constant")
def _constant(use: Use) -> Type:
    use.take(0)
    return Type.of(use.proto.literal.shape)


@rule("parameter")
def _parameter(use: Use) -> Type:
    use.take(0)
    return use.declared


@rule("iota")
def _iota(use: Use) -> Type:
    use.take(0)
    use.need(len(use.proto.dimensions) == 1, "it counts along one dimension")
    use.dimensions(use.proto.dimensions, len(use.declared.sizes))
    return use.declared


@rule("rng")
def _rng(use: Use) -> Type:
    low, high = use.take(2)
    use.need(low == high == use.declared.scalar, "both parameters are scalars of the result's element type")
    return use.declared


@rule("broadcast")
def _broadcast(use: Use) -> Type:
    (x,) = use.take(1)
    places = use.dimensions(use.proto.dimensions, len(use.declared.sizes))
    use.need(len(places) == len(x.sizes), "it names a place for each of the operand's dimensions")
    sizes = list(use.declared.sizes)
    for place, size in zip(places, x.sizes, strict=True):
        sizes[place] = size
    return x.resized(sizes)


@rule("reshape")
def _reshape(use: Use) -> Type:
    (x,) = use.take(1)
    use.need(math.prod(x.sizes) == math.prod(use.declared.sizes), "the number of elements changes")
    return x.resized(use.declared.sizes)


@rule("transpose")
def _transpose(use: Use) -> Type:
    (x,) = use.take(1)
    order = use.dimensions(use.proto.dimensions, len(x.sizes))
    use.need(len(order) == len(x.sizes), "it names every dimension once")
    return x.resized([x.sizes[place] for place in order])


@rule("slice")
def _slice(use: Use) -> Type:
    (x,) = use.take(1)
    cuts = use.proto.slice_dimensions
    use.need(len(cuts) == len(x.sizes), "it cuts every dimension")
    for cut, size in zip(cuts, x.sizes, strict=True):
        use.need(0 <= cut.start <= cut.limit <= size and cut.stride > 0, f"{cut.start}:{cut.limit}:{cut.stride}")
    return x.resized([-(-(cut.limit - cut.start) // cut.stride) for cut in cuts])


@rule("reverse")
def _reverse(use: Use) -> Type:
    (x,) = use.take(1)
    use.dimensions(use.proto.dimensions, len(x.sizes))
    return x


@rule("concatenate")
def _concatenate(use: Use) -> Type:
    use.need(bool(use.operands), "it takes at least one operand")
    first = use.operands[0]
    use.need(len(use.proto.dimensions) == 1, "it joins along one dimension")
    (place,) = use.dimensions(use.proto.dimensions, len(first.sizes))

    def joined(x: Type, size: int) -> Type:
        return x.resized([*x.sizes[:place], size, *x.sizes[place + 1 :]])

    total = 0
    for x in use.operands:
        use.need(len(x.sizes) == len(first.sizes), "the operands' ranks differ")
        use.need(joined(x, 0) == joined(first, 0), f"the operands differ in more than dimension {place}")
        total += x.sizes[place]
    return joined(first, total)


@rule("pad")
def _pad(use: Use) -> Type:
    x, value = use.take(2)
    edges = use.proto.padding_config.dimensions
    use.need(value == x.scalar, "the padding value is a scalar of the operand's element type")
    use.need(len(edges) == len(x.sizes), "it pads every dimension")
    sizes = [
        edge.edge_padding_low + size + max(size - 1, 0) * edge.interior_padding + edge.edge_padding_high
        for edge, size in zip(edges, x.sizes, strict=True)
    ]
    use.need(all(edge.interior_padding >= 0 for edge in edges) and min(sizes, default=0) >= 0, "a negative size")
    return x.resized(sizes)


def _starts(use: Use, x: Type, starts: list[Type], window: list[int]) -> None:
    same = len(set(starts)) <= 1 and all(start.element in INTEGERS and not start.sizes for start in starts)
    use.need(same and len(starts) == len(x.sizes), "a start for each dimension, integer scalars of one type")
    fits = len(window) == len(x.sizes) and all(a <= b for a, b in zip(window, x.sizes, strict=False))
    use.need(fits, "the window does not fit the operand")


@rule("dynamic-slice")
def _dynamic_slice(use: Use) -> Type:
    use.need(bool(use.operands), "it takes an operand and its starts")
    x, *starts = use.operands
    _starts(use, x, starts, list(use.proto.dynamic_slice_sizes))
    return x.resized(use.proto.dynamic_slice_sizes)


@rule("dynamic-update-slice")
def _dynamic_update_slice(use: Use) -> Type:
    use.need(len(use.operands) >= 2, "it takes an operand, an update and its starts")
    x, part, *starts = use.operands
    use.need(part.element == x.element, "the update has another element type")
    _starts(use, x, starts, list(part.sizes))
    return x


@rule("tuple")
def _tuple(use: Use) -> Type:
    return tuple_of(*use.operands)


@rule("get-tuple-element")
def _get_tuple_element(use: Use) -> Type:
    (values,) = use.take(1)
    use.need(0 <= use.proto.tuple_index < len(values.parts), f"there is no element {use.proto.tuple_index}")
    part: Type = values.parts[use.proto.tuple_index]
    return part
