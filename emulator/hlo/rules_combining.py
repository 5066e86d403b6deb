"""Type rules of instructions that combine values: dot, reductions, sort, gather, scatter, collectives, custom calls."""

from __future__ import annotations

from collections.abc import Callable

from neuronmm.emulator.hlo.custom import TRANSFER
from neuronmm.emulator.hlo.types import FLOATS, INTEGERS, PRED, U32, Instruction, Type, one_or_tuple, rule, tuple_of


@rule("dot")
def _dot(op: Instruction) -> Type:
    """Operands and result may have different element types; XLA multiplies in the wider operand's."""
    a, b = op.take(2)
    numbers = op.proto.dot_dimension_numbers
    left, right = list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions)
    batch, batch_right = list(numbers.lhs_batch_dimensions), list(numbers.rhs_batch_dimensions)
    op.require_dimensions([*batch, *left], len(a.sizes))
    op.require_dimensions([*batch_right, *right], len(b.sizes))
    for kind, of_a, of_b in (("contracted", left, right), ("batch", batch, batch_right)):
        sizes = [a.sizes[d] for d in of_a], [b.sizes[d] for d in of_b]
        op.require(sizes[0] == sizes[1], f"the {kind} dimensions have sizes {sizes[0]} and {sizes[1]}")
    free = [n for d, n in enumerate(a.sizes) if d not in batch and d not in left]
    free += [n for d, n in enumerate(b.sizes) if d not in batch_right and d not in right]
    return op.declared.resized([*(a.sizes[d] for d in batch), *free])


def _check_reduction(op: Instruction) -> list[Type]:
    """Return the types of the values to reduce; an equal number of initial values follows them."""
    count = len(op.operands) // 2
    values, starts = op.operands[:count], op.operands[count:]
    op.require(count > 0 and len(starts) == count, "it takes operands and one initial value per operand")
    op.require_accumulators(
        starts, [x.scalar for x in values], "an initial value must be a scalar of its operand's element type"
    )
    op.require(len({x.sizes for x in values}) == 1, "the operands' dimensions differ")
    op.require_computation([*starts, *starts], one_or_tuple(starts))
    return values


@rule("reduce")
def _reduce(op: Instruction) -> Type:
    values = _check_reduction(op)
    dims = op.require_dimensions(op.proto.dimensions, len(values[0].sizes))
    return one_or_tuple([x.resized([n for d, n in enumerate(x.sizes) if d not in dims]) for x in values])


@rule("reduce-window")
def _reduce_window(op: Instruction) -> Type:
    values, window = _check_reduction(op), op.proto.window.dimensions
    op.require(len(window) == len(values[0].sizes), "the window must have as many dimensions as the operand")
    sizes = []
    for d, size in zip(window, values[0].sizes, strict=True):
        op.require(d.size > 0 and d.stride > 0, "the window's size and stride must be 1 or more")
        base = max(size - 1, 0) * (d.base_dilation or 1) + min(size, 1) + d.padding_low + d.padding_high
        span = (d.size - 1) * (d.window_dilation or 1) + 1
        sizes.append(max(0, (base - span) // d.stride + 1))
    return one_or_tuple([x.resized(sizes) for x in values])


@rule("sort")
def _sort(op: Instruction) -> Type:
    op.require(bool(op.operands), "it takes at least one operand")
    op.require(len({x.sizes for x in op.operands}) == 1, "the operands' dimensions differ")
    op.require(len(op.proto.dimensions) == 1, "it must sort along one dimension")
    op.require_dimensions(op.proto.dimensions, len(op.operands[0].sizes))
    op.require_computation([x.scalar for x in op.operands for _ in range(2)], PRED)
    return one_or_tuple(op.operands)


@rule("batch-norm-training")
def _batch_norm_training(op: Instruction) -> Type:
    x, scale, offset = op.take(3)
    op.require(x.element in FLOATS, "it takes floats")
    (feature,) = op.require_dimensions([op.proto.feature_index], len(x.sizes))
    along = x.resized([x.sizes[feature]])
    op.require(scale == offset == along, f"scale and offset must be {along}")
    return tuple_of(x, along, along)


def _batch_sizes(op: Instruction, indices: Type, vector: int, mapped: int) -> list[int]:
    """Check a tensor of index vectors; return its dimensions without the index-vector dimension."""
    sizes = list(indices.sizes)
    op.require(indices.element in INTEGERS, "indices must be integers")
    op.require(0 <= vector <= len(sizes), f"index_vector_dim {vector} of indices with {len(sizes)} dimensions")
    length = 1 if vector == len(sizes) else sizes.pop(vector)
    op.require(length == mapped, f"an index vector has {length} components for {mapped} dimensions")
    return sizes


def _interleave(op: Instruction, windows: list[int], places: list[int], batch: list[int]) -> list[int]:
    """Return the sizes of a value with the window sizes at dimensions ``places`` and the batch sizes elsewhere."""
    count = len(windows) + len(batch)
    op.require_dimensions(places, count)
    op.require(len(places) == len(windows) and places == sorted(places), "it must place the window dimensions in order")
    batch_sizes = iter(batch)
    window_at = dict(zip(places, windows, strict=True))
    return [window_at[d] if d in window_at else next(batch_sizes) for d in range(count)]


@rule("gather")
def _gather(op: Instruction) -> Type:
    x, indices = op.take(2)
    numbers, windows = op.proto.gather_dimension_numbers, list(op.proto.gather_slice_sizes)
    mapped = op.require_dimensions(numbers.start_index_map, len(x.sizes))
    collapsed = op.require_dimensions(numbers.collapsed_slice_dims, len(x.sizes))
    fits = len(windows) == len(x.sizes) and all(0 <= w <= n for w, n in zip(windows, x.sizes, strict=False))
    op.require(fits and all(windows[d] <= 1 for d in collapsed), "the window does not fit the operand")
    batch = _batch_sizes(op, indices, numbers.index_vector_dim, len(mapped))
    window_sizes = [n for d, n in enumerate(windows) if d not in collapsed]
    return x.resized(_interleave(op, window_sizes, list(numbers.offset_dims), batch))


@rule("scatter")
def _scatter(op: Instruction) -> Type:
    count = len(op.operands) // 2
    op.require(count > 0 and len(op.operands) % 2 == 1, "it takes operands, indices, and one update per operand")
    values, indices, updates = op.operands[:count], op.operands[count], op.operands[count + 1 :]
    op.require(len({x.sizes for x in values}) == 1, "the operands' dimensions differ")
    numbers, sizes = op.proto.scatter_dimension_numbers, values[0].sizes
    mapped = op.require_dimensions(numbers.scatter_dims_to_operand_dims, len(sizes))
    inserted = op.require_dimensions(numbers.inserted_window_dims, len(sizes))
    places = op.require_dimensions(numbers.update_window_dims, len(updates[0].sizes))
    scalars = [x.scalar for x in values]
    op.require_computation([*scalars, *scalars], one_or_tuple(scalars))
    batch = _batch_sizes(op, indices, numbers.index_vector_dim, len(mapped))
    limits = [n for d, n in enumerate(sizes) if d not in inserted]
    windows = [updates[0].sizes[d] for d in places]
    fits = len(limits) == len(windows) and all(w <= n for w, n in zip(windows, limits, strict=False))
    op.require(fits, "the window does not fit the operand")
    expected = _interleave(op, windows, places, batch)
    problem = f"updates must have the operands' element types and sizes {expected}"
    op.require_accumulators(updates, [x.resized(expected) for x in values], problem)
    return one_or_tuple(values)


@rule("all-reduce")
def _all_reduce(op: Instruction) -> Type:
    op.require(bool(op.operands), "it takes at least one operand")
    scalar = op.operands[0].scalar
    op.require({x.scalar for x in op.operands} == {scalar}, "the operands' element types differ")
    op.require_computation([scalar, scalar], scalar)
    return one_or_tuple(op.operands)


def _group_size(op: Instruction) -> int:
    """Return the number of ranks in a replica group; all groups must have the same size."""
    sizes = {len(group.replica_ids) for group in op.proto.replica_groups} or {op.ranks}
    op.require(len(sizes) == 1, "the replica groups differ in size")
    return sizes.pop()


def _resize_dimension(op: Instruction, x: Type, size: Callable[[int, int], int]) -> Type:
    """Return ``x`` with the size along the instruction's dimension replaced by ``size(old size, group size)``."""
    op.require(len(op.proto.dimensions) == 1, "it must work along one dimension")
    (d,) = op.require_dimensions(op.proto.dimensions, len(x.sizes))
    return x.resized([*x.sizes[:d], size(x.sizes[d], _group_size(op)), *x.sizes[d + 1 :]])


@rule("all-gather")
def _all_gather(op: Instruction) -> Type:
    (x,) = op.take(1)
    return _resize_dimension(op, x, lambda size, ranks: size * ranks)


@rule("reduce-scatter")
def _reduce_scatter(op: Instruction) -> Type:
    (x,) = op.take(1)
    op.require_computation([x.scalar, x.scalar], x.scalar)

    def part(size: int, ranks: int) -> int:
        op.require(size % ranks == 0, f"{size} is not a multiple of the {ranks} ranks of a group")
        return size // ranks

    return _resize_dimension(op, x, part)


@rule("all-to-all")
def _all_to_all(op: Instruction) -> Type:
    (x,) = op.take(1)

    def same(size: int, ranks: int) -> int:
        op.require(size % ranks == 0, f"{size} is not a multiple of the {ranks} ranks of a group")
        return size

    return _resize_dimension(op, x, same)


@rule("replica-id")
def _replica_id(op: Instruction) -> Type:
    op.take(0)
    return U32


@rule("custom-call")
def _custom_call(op: Instruction) -> Type:
    """XLA leaves a custom call's type to its target; these rules are those of the interpreter's own operators."""
    target = op.proto.custom_call_target
    return _TARGETS[target](op) if target in _TARGETS else op.declared


def _same(op: Instruction) -> Type:
    (x,) = op.take(1)
    return x


def _resized(op: Instruction) -> Type:
    (x,) = op.take(1)
    _config_dimension(op, x)
    return op.declared.resized(x.sizes)


def _config_number(op: Instruction) -> int:
    """Return the number that a custom call's ``backend_config`` is."""
    config = op.proto.backend_config
    op.require(config.removeprefix(b"-").isdigit(), f"its backend_config must be an integer, not {config!r}")
    return int(config)


def _config_dimension(op: Instruction, x: Type) -> int:
    """Return the dimension that a custom call's ``backend_config`` names."""
    dimension = _config_number(op)
    op.require(-len(x.sizes) <= dimension < len(x.sizes), f"dimension {dimension} of a value that has {len(x.sizes)}")
    return dimension % len(x.sizes)


def _rms_norm(op: Instruction) -> Type:
    x, weight, epsilon = op.take(3)
    size = x.sizes[_config_dimension(op, x)]
    op.require(
        weight.sizes == (size,) and not epsilon.sizes, f"the weight must have {size} elements, epsilon must be a scalar"
    )
    return op.declared.resized(x.sizes)


def _argmax(op: Instruction) -> Type:
    (x,) = op.take(1)
    dimension = _config_dimension(op, x)
    op.require(op.declared.element in INTEGERS, "its result must be an integer")
    return op.declared.resized([n for d, n in enumerate(x.sizes) if d != dimension])


def _topk(op: Instruction) -> Type:
    (x,) = op.take(1)
    k = _config_number(op)
    op.require(len(op.declared.parts) == 2 and bool(x.sizes), "its result must be a pair, values and indices")
    op.require(op.declared.parts[1].element in INTEGERS, "its indices must be integers")
    op.require(0 < k <= x.sizes[-1], f"the largest {k} of a last dimension of {x.sizes[-1]}")
    sizes = [*x.sizes[:-1], k]
    return tuple_of(x.resized(sizes), op.declared.parts[1].resized(sizes))


_TARGETS: dict[str, Callable[[Instruction], Type]] = {
    TRANSFER: _same,
    "AwsNeuronGeluApprxTanh": _same,
    "AwsNeuronSoftmax": _resized,
    "AwsNeuronRmsNorm": _rms_norm,
    "AwsNeuronArgMax": _argmax,
    "AwsNeuronTopK": _topk,
}
