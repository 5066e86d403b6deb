"""Type rules of instructions that contract, reduce, sort, gather and scatter, of collectives and of custom calls."""

from __future__ import annotations

from collections.abc import Callable

from neuronmm.emulator.hlo.custom import TRANSFER
from neuronmm.emulator.hlo.types import FLOATS, INTEGERS, PRED, U32, Type, Use, rule, together, tuple_of


@rule("dot")
def _dot(use: Use) -> Type:
    """The operands may differ in element type, and the result's is free: XLA multiplies in the wider one."""
    a, b = use.take(2)
    numbers = use.proto.dot_dimension_numbers
    left, right = list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions)
    batch, batch_right = list(numbers.lhs_batch_dimensions), list(numbers.rhs_batch_dimensions)
    use.dimensions([*batch, *left], len(a.sizes))
    use.dimensions([*batch_right, *right], len(b.sizes))
    for what, of_a, of_b in (("contracted", left, right), ("batch", batch, batch_right)):
        sizes = [a.sizes[d] for d in of_a], [b.sizes[d] for d in of_b]
        use.need(sizes[0] == sizes[1], f"the {what} dimensions have sizes {sizes[0]} and {sizes[1]}")
    free = [n for d, n in enumerate(a.sizes) if d not in batch and d not in left]
    free += [n for d, n in enumerate(b.sizes) if d not in batch_right and d not in right]
    return use.declared.resized([*(a.sizes[d] for d in batch), *free])


def _reducible(use: Use) -> list[Type]:
    """The values that are reduced together, by one computation; their initial values follow them."""
    count = len(use.operands) // 2
    values, starts = use.operands[:count], use.operands[count:]
    use.need(count > 0 and len(starts) == count, "it takes operands, and an initial value for each")
    use.accumulates(starts, [x.scalar for x in values], "an initial value is a scalar of its operand's element type")
    use.need(len({x.sizes for x in values}) == 1, "the operands' dimensions differ")
    use.applies([*starts, *starts], together(starts))
    return values


@rule("reduce")
def _reduce(use: Use) -> Type:
    values = _reducible(use)
    dims = use.dimensions(use.proto.dimensions, len(values[0].sizes))
    return together([x.resized([n for d, n in enumerate(x.sizes) if d not in dims]) for x in values])


@rule("reduce-window")
def _reduce_window(use: Use) -> Type:
    values, window = _reducible(use), use.proto.window.dimensions
    use.need(len(window) == len(values[0].sizes), "the window has another number of dimensions")
    sizes = []
    for d, size in zip(window, values[0].sizes, strict=True):
        use.need(d.size > 0 and d.stride > 0, "a window's size and stride are 1 or more")
        base = max(size - 1, 0) * (d.base_dilation or 1) + min(size, 1) + d.padding_low + d.padding_high
        span = (d.size - 1) * (d.window_dilation or 1) + 1
        sizes.append(max(0, (base - span) // d.stride + 1))
    return together([x.resized(sizes) for x in values])


@rule("sort")
def _sort(use: Use) -> Type:
    use.need(bool(use.operands), "it takes at least one operand")
    use.need(len({x.sizes for x in use.operands}) == 1, "the operands' dimensions differ")
    use.need(len(use.proto.dimensions) == 1, "it sorts along one dimension")
    use.dimensions(use.proto.dimensions, len(use.operands[0].sizes))
    use.applies([x.scalar for x in use.operands for _ in range(2)], PRED)
    return together(use.operands)


@rule("batch-norm-training")
def _batch_norm_training(use: Use) -> Type:
    x, scale, offset = use.take(3)
    use.need(x.element in FLOATS, "it takes floats")
    (feature,) = use.dimensions([use.proto.feature_index], len(x.sizes))
    along = x.resized([x.sizes[feature]])
    use.need(scale == offset == along, f"scale and offset have to be {along}")
    return tuple_of(x, along, along)


def _positions(use: Use, indices: Type, vector: int, mapped: int) -> list[int]:
    """The dimensions of the positions that ``indices`` holds, without the one along which a position lies."""
    sizes = list(indices.sizes)
    use.need(indices.element in INTEGERS, "indices are integers")
    use.need(0 <= vector <= len(sizes), f"index_vector_dim {vector}")
    length = 1 if vector == len(sizes) else sizes.pop(vector)
    use.need(length == mapped, f"a position has {length} components for {mapped} dimensions")
    return sizes


def _interleaved(use: Use, windows: list[int], places: list[int], batch: list[int]) -> list[int]:
    """The dimensions of a value that has the windows' at ``places`` and the positions' elsewhere."""
    rank = len(windows) + len(batch)
    use.dimensions(places, rank)
    use.need(len(places) == len(windows) and places == sorted(places), "each window dimension has a place, in order")
    rest = iter(batch)
    of = dict(zip(places, windows, strict=True))
    return [of[d] if d in of else next(rest) for d in range(rank)]


@rule("gather")
def _gather(use: Use) -> Type:
    x, indices = use.take(2)
    numbers, windows = use.proto.gather_dimension_numbers, list(use.proto.gather_slice_sizes)
    mapped = use.dimensions(numbers.start_index_map, len(x.sizes))
    collapsed = use.dimensions(numbers.collapsed_slice_dims, len(x.sizes))
    fits = len(windows) == len(x.sizes) and all(0 <= w <= n for w, n in zip(windows, x.sizes, strict=False))
    use.need(fits and all(windows[d] <= 1 for d in collapsed), "the window does not fit the operand")
    batch = _positions(use, indices, numbers.index_vector_dim, len(mapped))
    kept = [n for d, n in enumerate(windows) if d not in collapsed]
    return x.resized(_interleaved(use, kept, list(numbers.offset_dims), batch))


@rule("scatter")
def _scatter(use: Use) -> Type:
    count = len(use.operands) // 2
    use.need(count > 0 and len(use.operands) % 2 == 1, "it takes operands, indices, and an update for each operand")
    values, indices, updates = use.operands[:count], use.operands[count], use.operands[count + 1 :]
    use.need(len({x.sizes for x in values}) == 1, "the operands' dimensions differ")
    numbers, sizes = use.proto.scatter_dimension_numbers, values[0].sizes
    mapped = use.dimensions(numbers.scatter_dims_to_operand_dims, len(sizes))
    inserted = use.dimensions(numbers.inserted_window_dims, len(sizes))
    places = use.dimensions(numbers.update_window_dims, len(updates[0].sizes))
    scalars = [x.scalar for x in values]
    use.applies([*scalars, *scalars], together(scalars))
    batch = _positions(use, indices, numbers.index_vector_dim, len(mapped))
    whole = [n for d, n in enumerate(sizes) if d not in inserted]
    windows = [updates[0].sizes[d] for d in places]
    fits = len(whole) == len(windows) and all(w <= n for w, n in zip(windows, whole, strict=False))
    use.need(fits, "the window does not fit the operand")
    made = _interleaved(use, windows, places, batch)
    use.accumulates(updates, [x.resized(made) for x in values], f"updates are of the operands' type, and {made}")
    return together(values)


@rule("all-reduce")
def _all_reduce(use: Use) -> Type:
    use.need(bool(use.operands), "it takes at least one operand")
    scalar = use.operands[0].scalar
    use.need({x.scalar for x in use.operands} == {scalar}, "the operands' element types differ")
    use.applies([scalar, scalar], scalar)
    return together(use.operands)


def _group(use: Use) -> int:
    """How many ranks a replica group has."""
    sizes = {len(group.replica_ids) for group in use.proto.replica_groups} or {use.ranks}
    use.need(len(sizes) == 1, "the replica groups differ in size")
    return sizes.pop()


def _along(use: Use, x: Type, size: Callable[[int, int], int]) -> Type:
    """``x`` with the size along the instruction's dimension changed by ``size(old, ranks in a group)``."""
    use.need(len(use.proto.dimensions) == 1, "it works along one dimension")
    (place,) = use.dimensions(use.proto.dimensions, len(x.sizes))
    return x.resized([*x.sizes[:place], size(x.sizes[place], _group(use)), *x.sizes[place + 1 :]])


@rule("all-gather")
def _all_gather(use: Use) -> Type:
    (x,) = use.take(1)
    return _along(use, x, lambda size, ranks: size * ranks)


@rule("reduce-scatter")
def _reduce_scatter(use: Use) -> Type:
    (x,) = use.take(1)
    use.applies([x.scalar, x.scalar], x.scalar)

    def part(size: int, ranks: int) -> int:
        use.need(size % ranks == 0, f"{size} is no multiple of the {ranks} ranks of a group")
        return size // ranks

    return _along(use, x, part)


@rule("all-to-all")
def _all_to_all(use: Use) -> Type:
    (x,) = use.take(1)

    def same(size: int, ranks: int) -> int:
        use.need(size % ranks == 0, f"{size} is no multiple of the {ranks} ranks of a group")
        return size

    return _along(use, x, same)


@rule("replica-id")
def _replica_id(use: Use) -> Type:
    use.take(0)
    return U32


@rule("custom-call")
def _custom_call(use: Use) -> Type:
    """XLA leaves a custom call's type to its target; these are Neuron's own operators as the interpreter has them."""
    target = use.proto.custom_call_target
    return _TARGETS[target](use) if target in _TARGETS else use.declared


def _same(use: Use) -> Type:
    (x,) = use.take(1)
    return x


def _resized(use: Use) -> Type:
    (x,) = use.take(1)
    _along_config(use, x)
    return use.declared.resized(x.sizes)


def _along_config(use: Use, x: Type) -> int:
    """The dimension that a custom call's configuration names."""
    place = int(use.proto.backend_config)
    use.need(-len(x.sizes) <= place < len(x.sizes), f"dimension {place} of a value that has {len(x.sizes)}")
    return place % len(x.sizes)


def _rms_norm(use: Use) -> Type:
    x, weight, epsilon = use.take(3)
    size = x.sizes[_along_config(use, x)]
    use.need(weight.sizes == (size,) and not epsilon.sizes, f"the weight has {size} elements, epsilon is a scalar")
    return use.declared.resized(x.sizes)


def _argmax(use: Use) -> Type:
    (x,) = use.take(1)
    place = _along_config(use, x)
    use.need(use.declared.element in INTEGERS, "its result is an index")
    return use.declared.resized([n for d, n in enumerate(x.sizes) if d != place])


def _topk(use: Use) -> Type:
    (x,) = use.take(1)
    k = int(use.proto.backend_config)
    use.need(len(use.declared.parts) == 2 and bool(x.sizes), "its result is a pair, values and indices")
    use.need(
        use.declared.parts[1].element in INTEGERS and 0 < k <= x.sizes[-1], f"the largest {k} of the last dimension"
    )
    sizes = [*x.sizes[:-1], k]
    return tuple_of(x.resized(sizes), use.declared.parts[1].resized(sizes))


_TARGETS: dict[str, Callable[[Use], Type]] = {
    TRANSFER: _same,
    "AwsNeuronGeluApprxTanh": _same,
    "AwsNeuronSoftmax": _resized,
    "AwsNeuronRmsNorm": _rms_norm,
    "AwsNeuronArgMax": _argmax,
    "AwsNeuronTopK": _topk,
}
