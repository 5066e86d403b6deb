"""Every operation against XLA, over shapes, attributes and dtypes. Skipped without jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from draws import examples

Like = Callable[..., None]
eight_examples = examples(8, suppress_health_check=[HealthCheck.function_scoped_fixture])
sizes = st.lists(st.integers(1, 4), min_size=0, max_size=4)
floats = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
INTEGERS = [torch.int32, torch.int8, torch.uint8, torch.int64]
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, 100.0, -1e30, float("inf"), float("-inf"), float("nan")]
DIRECTIONS = ["EQ", "NE", "LT", "LE", "GT", "GE"]


def random(shape: Any, dtype: torch.dtype, low: int = -5, high: int = 6) -> torch.Tensor:
    if dtype.is_floating_point:
        return (torch.randn(list(shape)) * 2).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, list(shape)).bool()
    return torch.randint(0 if dtype is torch.uint8 else low, high, list(shape)).to(dtype)


def binary_computation(dtype: Any, name: str) -> Any:
    def apply(scribe: Any) -> Any:
        return getattr(dtype, name)(dtype.Parameter(parameter_number=0), dtype.Parameter(parameter_number=1))

    return apply


def second_parameter(dtype: Any) -> Any:
    def apply(scribe: Any) -> Any:
        dtype.Parameter(parameter_number=0)
        return dtype.Parameter(parameter_number=1)

    return apply


FLOAT_UNARY = "Abs Ceil Cos Exp Floor Logistic Neg Sign Sin Tanh Cbrt RoundNearestEven ExponentialMinusOne".split()  # noqa: SIM905
POSITIVE = ["Log", "Rsqrt", "Sqrt", "LogPlusOne"]


@pytest.mark.parametrize("name", [*FLOAT_UNARY, *POSITIVE])
@eight_examples
@given(shape=sizes, dtype=floats)
def test_unary(like_xla: Like, name: str, shape: list[int], dtype: torch.dtype) -> None:
    x = random(shape, dtype)
    like_xla(lambda s, x: getattr(x.dtype[x.sizes], name)(x), x.abs() + 0.125 if name in POSITIVE else x)


@pytest.mark.parametrize("name", ["Floor", "Abs", "Exp", "Logistic", "Sqrt", "Rsqrt", "Tanh", "Sign"])
def test_unary_at_the_edges(like_xla: Like, name: str) -> None:
    like_xla(lambda s, x: getattr(x.dtype[x.sizes], name)(x), torch.tensor(EDGES))


@pytest.mark.parametrize("name", ["Abs", "Neg", "Not", "Sign"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.int64])
def test_unary_of_integers(like_xla: Like, name: str, dtype: torch.dtype) -> None:
    like_xla(lambda s, x: getattr(x.dtype[x.sizes], name)(x), random((3, 5), dtype))


@pytest.mark.parametrize("name", ["Add", "Subtract", "Multiply", "Divide", "Maximum", "Minimum", "Remainder", "Pow"])
@eight_examples
@given(shape=sizes, dtype=floats)
def test_binary(like_xla: Like, name: str, shape: list[int], dtype: torch.dtype) -> None:
    x, y = random(shape, dtype), random(shape, dtype)
    x = x.abs() + 0.25 if name == "Pow" else x
    like_xla(lambda s, x, y: getattr(x.dtype[x.sizes], name)(x, y), x, y)


@pytest.mark.parametrize("name", ["Add", "Multiply", "Divide", "Maximum", "Minimum"])
def test_binary_at_the_edges(like_xla: Like, name: str) -> None:
    x, y = torch.cartesian_prod(torch.tensor(EDGES), torch.tensor(EDGES)).T.contiguous()
    like_xla(lambda s, x, y: getattr(x.dtype[x.sizes], name)(x, y), x, y)


INTEGER_BINARY = ["Add", "Subtract", "Multiply", "Divide", "Maximum", "Minimum", "Remainder", "And", "Or", "Xor"]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", [*INTEGER_BINARY, "ShiftLeft", "ShiftRightLogical", "ShiftRightArithmetic"])
def test_binary_of_integers(like_xla: Like, name: str, dtype: torch.dtype) -> None:
    """Includes zero divisors, shifts beyond the width, and overflow."""
    low, high = (0, 70) if dtype is torch.uint8 or name.startswith("Shift") else (-120, 120)
    x, y = random((64,), dtype, low, high), random((64,), dtype, 0 if name.startswith("Shift") else -3, 12)
    like_xla(lambda s, x, y: getattr(x.dtype[x.sizes], name)(x, y), x, y)


@pytest.mark.parametrize("name", ["Add", "Subtract", "Multiply", "Divide", "Not", "ShiftRightLogical"])
def test_unsigned_32(like_xla: Like, name: str) -> None:
    """u32 is stored in int64; results must wrap at 32 bits."""
    x, y = torch.tensor([1, 7, 2**31 - 1, -1, -5], dtype=torch.int32), torch.tensor([3, 9, 2, 1, 31], dtype=torch.int32)

    def build(s: Any, x: Any, y: Any) -> Any:
        x, y = s.u32[5].Convert(x), s.u32[5].Convert(y)
        z = s.u32[5].Not(x) if name == "Not" else getattr(s.u32[5], name)(x, y)
        return [s.s64[5].Convert(z), s.pred[5].Compare(z, y, comparison_direction="LT"), s.f32[5].Convert(z)]

    like_xla(build, x, y)


@pytest.mark.parametrize("name", ["And", "Or", "Xor", "Add", "Multiply", "Maximum"])
def test_booleans(like_xla: Like, name: str) -> None:
    x, y = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    like_xla(lambda s, x, y: getattr(s.pred[4], name)(x, y), x, y)
    like_xla(lambda s, x: s.pred[4].Not(x), x)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_compare_select_clamp(like_xla: Like, direction: str, dtype: torch.dtype) -> None:
    x, y = random((40,), dtype, -2, 3), random((40,), dtype, -2, 3)

    def build(s: Any, x: Any, y: Any) -> Any:
        p = s.pred[40].Compare(x, y, comparison_direction=direction)
        return [p, x.dtype[40].Select(p, x, y)]

    like_xla(build, x, y)
    if dtype is not torch.bool:
        like_xla(lambda s, lo, x, hi: x.dtype[40].Clamp(lo, x, hi), x.min() / 2 if dtype.is_floating_point else x, y, x)


@pytest.mark.parametrize("source", ["f32", "bf16", "s32", "s8", "u8", "pred", "u32", "s64", "f16"])
@pytest.mark.parametrize("target", ["f32", "bf16", "s32", "s8", "u8", "pred", "u32", "s64", "f16"])
def test_convert(like_xla: Like, source: str, target: str) -> None:
    """Truncation, saturation and wrapping."""
    x = torch.tensor([0.0, 1.0, -1.0, 0.4, 2.6, 100.0, 130.7, 300.0, 70000.0, 3e9, 1e12])

    def build(s: Any, x: Any) -> Any:
        return getattr(s, target)[11].Convert(getattr(s, source)[11].Convert(x))

    like_xla(build, x)


@eight_examples
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.bool]))
def test_instructions_that_rearrange_elements(like_xla: Like, data: st.DataObject, dtype: torch.dtype) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    x, rank = random(shape, dtype), len(shape)
    order = data.draw(st.permutations(range(rank)))
    like_xla(lambda s, x: x.dtype[[shape[d] for d in order]].Transpose(x, dimensions=order), x)
    like_xla(lambda s, x: x.dtype[x.sizes[::-1]].Reshape(x), x)
    like_xla(lambda s, x: x.dtype[x.sizes].Reverse(x, dimensions=order[: rank // 2]), x)
    out = data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank + 2))
    dimensions = sorted(data.draw(st.permutations(range(len(out))))[:rank])
    for dimension, size in zip(dimensions, shape, strict=True):
        out[dimension] = size
    like_xla(lambda s, x: x.dtype[out].Broadcast(x, dimensions=dimensions), x)
    slices = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        slices.append({"start": start, "limit": data.draw(st.integers(start + 1, size)), "stride": 1 + size % 2})
    sliced = [-(-(c["limit"] - c["start"]) // c["stride"]) for c in slices]
    like_xla(lambda s, x: x.dtype[sliced].Slice(x, slice_dimensions=slices), x)
    dim = order[0]
    joined = [3 * n if d == dim else n for d, n in enumerate(shape)]
    like_xla(lambda s, x: x.dtype[joined].Concatenate(x, x, x, dimensions=[dim]), x)
    like_xla(lambda s, x: [x, s.s32[shape].Iota(dimensions=[dim]), s.f32[shape].Iota(dimensions=[dim])], x)


@eight_examples
@given(data=st.data())
def test_pad(like_xla: Like, data: st.DataObject) -> None:
    """Edge padding may be negative; interior padding may be present."""
    shape = data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    edge = st.integers(-1, 2)
    config = [
        {"edge_padding_low": data.draw(edge), "edge_padding_high": data.draw(edge), "interior_padding": n % 3}
        for n in shape
    ]
    out = [
        n + (n - 1) * c["interior_padding"] + c["edge_padding_low"] + c["edge_padding_high"]
        for n, c in zip(shape, config, strict=True)
    ]
    like_xla(
        lambda s, x, v: s.f32[out].Pad(x, v, padding_config={"dimensions": config}),
        random(shape, torch.float32),
        torch.tensor(0.5),
    )


@eight_examples
@given(data=st.data())
def test_dynamic_slices(like_xla: Like, data: st.DataObject) -> None:
    """A start out of range is moved into range."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    part = [data.draw(st.integers(1, n)) for n in shape]
    starts = [torch.tensor(data.draw(st.integers(-2, 7)), dtype=torch.int32) for _ in shape]
    x, y = random(shape, torch.float32), random(part, torch.float32)
    like_xla(lambda s, x, *i: s.f32[part].DynamicSlice(x, *i, dynamic_slice_sizes=part), x, *starts)
    like_xla(lambda s, x, y, *i: s.f32[shape].DynamicUpdateSlice(x, y, *i), x, y, *starts)


@eight_examples
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_dot(like_xla: Like, data: st.DataObject, dtype: torch.dtype) -> None:
    batch, contracted, left, right = (data.draw(st.lists(st.integers(1, 5), max_size=2)) for _ in range(4))
    a_order = data.draw(st.permutations(range(len(batch + contracted + left))))
    b_order = data.draw(st.permutations(range(len(batch + contracted + right))))
    a_sizes, b_sizes = (
        [(batch + contracted + left)[d] for d in a_order],
        [(batch + contracted + right)[d] for d in b_order],
    )
    n, k = len(batch), len(contracted)
    dims = {
        "lhs_batch_dimensions": [a_order.index(d) for d in range(n)],
        "rhs_batch_dimensions": [b_order.index(d) for d in range(n)],
        "lhs_contracting_dimensions": [a_order.index(n + d) for d in range(k)],
        "rhs_contracting_dimensions": [b_order.index(n + d) for d in range(k)],
    }
    free_a = [a_sizes[p] for p, d in enumerate(a_order) if d >= n + k]
    free_b = [b_sizes[p] for p, d in enumerate(b_order) if d >= n + k]
    out = [*batch, *free_a, *free_b]
    a, b = random(a_sizes, dtype), random(b_sizes, dtype)
    like_xla(lambda s, a, b: a.dtype[out].Dot(a, b, dot_dimension_numbers=dims), a, b, ulps=16, sums=True)
    like_xla(lambda s, a, b: s.f32[out].Dot(a, b, dot_dimension_numbers=dims), a, b, ulps=64, sums=True)


@pytest.mark.parametrize(("name", "start"), [("Add", 0), ("Maximum", -100), ("Minimum", 100), ("Multiply", 1)])
@eight_examples
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int32]))
def test_reduce(like_xla: Like, name: str, start: int, data: st.DataObject, dtype: torch.dtype) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dims = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    out = [n for d, n in enumerate(shape) if d not in dims]

    def build(s: Any, x: Any) -> Any:
        init = x.dtype.Constant(constant_value=start)
        return x.dtype[out].Reduce(x, init, dimensions=dims, to_apply=binary_computation(x.dtype, name))

    like_xla(build, random(shape, dtype, -2, 3), ulps=32, sums=True)


@pytest.mark.parametrize("start", [0, 1, -1])
@pytest.mark.parametrize("name", ["And", "Or"])
def test_reduce_bits(like_xla: Like, name: str, start: int) -> None:
    def build(s: Any, x: Any) -> Any:
        init = x.dtype.Constant(constant_value=bool(start) if x.dtype is s.pred else start)
        return x.dtype[3].Reduce(x, init, dimensions=[0, 2], to_apply=binary_computation(x.dtype, name))

    like_xla(build, torch.rand(4, 3, 2) > 0.3)
    for dtype in (torch.int32, torch.int8, torch.int64):
        like_xla(build, random((4, 3, 2), dtype, 4, 128))


@pytest.mark.parametrize("dim", [0, 1])
def test_cumulative_sum_by_reduce_window(like_xla: Like, dim: int) -> None:
    x = random((3, 4), torch.float32)
    n = x.shape[dim]
    window = [
        {"size": n if d == dim else 1, "stride": 1, "padding_low": n - 1 if d == dim else 0, "window_dilation": 1,
         "base_dilation": 1}
        for d in range(2)
    ]  # fmt: skip

    def build(s: Any, x: Any) -> Any:
        init = s.f32.Constant(constant_value=0)
        return s.f32[3, 4].ReduceWindow(
            x, init, to_apply=binary_computation(s.f32, "Add"), window={"dimensions": window}
        )

    like_xla(build, x, sums=True)


@pytest.mark.parametrize("direction", ["LT", "GT"])
@pytest.mark.parametrize("dim", [0, 1])
def test_sort(like_xla: Like, direction: str, dim: int) -> None:
    def build(s: Any, x: Any) -> Any:
        def compare_one(_: Any) -> Any:
            a, b = s.f32.Parameter(parameter_number=0), s.f32.Parameter(parameter_number=1)
            return s.pred.Compare(a, b, comparison_direction=direction)

        def compare_two(_: Any) -> Any:
            result = compare_one(_)
            s.s32.Parameter(parameter_number=2), s.s32.Parameter(parameter_number=3)
            return result

        alone = s.f32[5, 6].Sort(x, to_apply=compare_one, dimensions=[dim])
        index = s.s32[5, 6].Iota(dimensions=[dim])
        both = s.tuple(s.f32[5, 6], s.s32[5, 6]).Sort(x, index, to_apply=compare_two, dimensions=[dim])
        return [
            alone,
            s.f32[5, 6].GetTupleElement(both, tuple_index=0),
            s.s32[5, 6].GetTupleElement(both, tuple_index=1),
        ]

    like_xla(build, random((5, 6), torch.float32))


@pytest.mark.parametrize("feature", [0, 1])
def test_batch_norm_training(like_xla: Like, feature: int) -> None:
    x = random((6, 6), torch.float32)

    def build(s: Any, x: Any, scale: Any, offset: Any) -> Any:
        shape = s.tuple(s.f32[6, 6], s.f32[6], s.f32[6])
        result = shape.BatchNormTraining(x, scale, offset, epsilon=1e-5, feature_index=feature)
        return [result.get_tuple_element(i).GetTupleElement(result, tuple_index=i) for i in range(3)]

    like_xla(build, x, torch.rand(6), torch.rand(6), ulps=32, sums=True)


@pytest.mark.parametrize("name", ["second", "Add", "Maximum", "Minimum", "Multiply"])
@eight_examples
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_scatter_rows(like_xla: Like, name: str, data: st.DataObject, dtype: torch.dtype) -> None:
    """The form in which hosts update caches; positions out of range are skipped."""
    rows = data.draw(st.integers(2, 6))
    count = data.draw(st.integers(1, 2))
    at = torch.tensor(data.draw(st.permutations(range(-1, rows + 1)))[:count], dtype=torch.int32)
    numbers = {
        "update_window_dims": [1, 2],
        "inserted_window_dims": [0],
        "scatter_dims_to_operand_dims": [0],
        "index_vector_dim": 1,
    }

    def build(s: Any, x: Any, at: Any, values: Any) -> Any:
        apply = second_parameter(x.dtype) if name == "second" else binary_computation(x.dtype, name)
        return x.dtype[x.sizes].Scatter(x, at, values, scatter_dimension_numbers=numbers, to_apply=apply)

    like_xla(build, random((rows, 2, 3), dtype), at, random((count, 2, 3), dtype))


@eight_examples
@given(data=st.data())
def test_gather_and_scatter_windows(like_xla: Like, data: st.DataObject) -> None:
    """Windows at any position, index vectors along any dimension."""
    shape = data.draw(st.lists(st.integers(2, 4), min_size=2, max_size=3))
    rank = len(shape)
    mapped = data.draw(st.permutations(range(rank)))[: data.draw(st.integers(1, rank))]
    collapsed = sorted(data.draw(st.sets(st.integers(0, rank - 1), max_size=rank)))
    window = [1 if d in collapsed else data.draw(st.integers(1, shape[d])) for d in range(rank)]
    batch = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    vector = data.draw(st.integers(0, len(batch)))
    index_shape = [*batch[:vector], len(mapped), *batch[vector:]]
    window_sizes = [window[d] for d in range(rank) if d not in collapsed]
    total = len(batch) + len(window_sizes)
    offsets = sorted(data.draw(st.permutations(range(total)))[: len(window_sizes)])
    out, next_batch, next_window = [], iter(batch), iter(window_sizes)
    for d in range(total):
        out.append(next(next_window) if d in offsets else next(next_batch))
    index = torch.randint(-1, 5, index_shape, dtype=torch.int32)
    numbers = {"offset_dims": offsets, "collapsed_slice_dims": collapsed, "start_index_map": mapped}

    def gather(s: Any, x: Any, index: Any) -> Any:
        dims = {**numbers, "index_vector_dim": vector}
        return s.f32[out].Gather(x, index, gather_dimension_numbers=dims, gather_slice_sizes=window)

    x = random(shape, torch.float32)
    like_xla(gather, x, index)
    dims = {
        "update_window_dims": offsets,
        "inserted_window_dims": collapsed,
        "scatter_dims_to_operand_dims": mapped,
        "index_vector_dim": vector,
    }

    def scatter(s: Any, x: Any, index: Any, values: Any) -> Any:
        apply = binary_computation(s.f32, "Add")
        return s.f32[shape].Scatter(x, index, values, scatter_dimension_numbers=dims, to_apply=apply)

    like_xla(scatter, x, index, random(out, torch.float32), sums=True)


@pytest.mark.parametrize("axis", [0, 1])
def test_index_select(like_xla: Like, axis: int) -> None:
    """The form in which hosts look up embedding rows and the last token."""
    x, index = random((4, 6), torch.bfloat16), torch.tensor([2, 0, 9], dtype=torch.int32)
    out = [3 if d == axis else n for d, n in enumerate(x.shape)]
    numbers = {
        "offset_dims": [d for d in range(2) if d != axis],
        "collapsed_slice_dims": [axis],
        "start_index_map": [axis],
        "index_vector_dim": 1,
    }
    window = [1 if d == axis else n for d, n in enumerate(x.shape)]
    like_xla(
        lambda s, x, i: s.bf16[out].Gather(x, i, gather_dimension_numbers=numbers, gather_slice_sizes=window), x, index
    )
