"""Programs: aliased memory, collectives, custom calls and refusals. Runs without XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuronmm.emulator.hlo import InvalidGraphError, Program, Settings, UnsupportedError
from neuronmm.emulator.nki import nki_modules
from neuronmm.emulator.pyhlo import HloScribe, HloShape
from neuronmm.emulator.pyhlo.literal import DTYPES

with nki_modules():
    import neuronxcc.nki as nki
    import neuronxcc.nki.language as nl

ROW = {
    "update_window_dims": [1],
    "inserted_window_dims": [0],
    "scatter_dims_to_operand_dims": [0],
    "index_vector_dim": 1,
}


def module(graph: Callable[[Any], Any]) -> Any:
    return HloScribe()(graph).module_proto


def outputs(scribe: Any, *values: Any) -> Any:
    return scribe.tuple(*[v.dtype[v.sizes] for v in values]).Tuple(*values)


def second_parameter(dtype: Any) -> Any:
    def apply(scribe: Any) -> Any:
        dtype.Parameter(parameter_number=0)
        return dtype.Parameter(parameter_number=1)

    return apply


def addition(dtype: Any) -> Any:
    return lambda scribe: dtype.Add(dtype.Parameter(parameter_number=0), dtype.Parameter(parameter_number=1))


def write_row(cache: Any, at: Any, row: Any) -> Any:
    f32 = cache.dtype
    return f32[cache.sizes].Scatter(cache, at, row, scatter_dimension_numbers=ROW, to_apply=second_parameter(f32))


@pytest.mark.parametrize("aliased", [True, False])
@pytest.mark.parametrize("read", ["before", "after", "never", "through a view, after"])
def test_a_cache_is_overwritten_only_if_no_other_value_sees_it(aliased: bool, read: str) -> None:
    def graph(scribe: Any) -> Any:
        f32, s32 = scribe.f32, scribe.s32
        cache, row = f32[4, 3].Parameter(parameter_number=0), f32[1, 3].Parameter(parameter_number=1)
        at = s32[1].Parameter(parameter_number=2)
        transferred = f32[4, 3].CustomCall(cache, custom_call_target="AwsNeuronTransferWithStaticRing")
        view = f32[3, 4].Transpose(transferred, dimensions=[1, 0])
        observed = f32[4, 3].Negate(transferred) if read == "before" else row
        new = f32[4, 3].Reshape(write_row(f32[4, 3].Reshape(transferred), at, row))
        if read == "after":
            observed = f32[4, 3].Negate(transferred)
        elif "view" in read:
            observed = f32[3, 4].Negate(view)
        if aliased:
            new.set_alias_to(cache, must=True)
        return outputs(scribe, new, observed)

    program = Program(module(graph), 1)
    cache, row = torch.arange(12.0).reshape(4, 3), torch.tensor([[7.0, 8.0, 9.0]])
    buffer, updated = cache.clone(), cache.clone()
    updated[2] = row
    new, observed = (ranks[0] for ranks in program([[buffer], [row], [torch.tensor([2], dtype=torch.int32)]]))
    assert torch.equal(new, updated)
    expected = {"before": -cache, "after": -cache, "never": row, "through a view, after": -cache.T}
    assert torch.equal(observed, expected[read])
    in_place = aliased and read in ("before", "never")
    assert (new.data_ptr() == buffer.data_ptr()) == in_place
    assert torch.equal(buffer, updated if in_place else cache)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("aliased", [False, True])
def test_an_element_of_a_tuple_inside_the_graph_is_not_overwritten(aliased: bool, nested: bool) -> None:
    def graph(scribe: Any) -> Any:
        f32, s32 = scribe.f32, scribe.s32
        cache, row = f32[4, 3].Parameter(parameter_number=0), f32[1, 3].Parameter(parameter_number=1)
        at = s32[1].Parameter(parameter_number=2)
        shape = scribe.tuple(f32[1, 3], f32[4, 3])
        pair = shape.Tuple(row, cache)
        if nested:
            outer = scribe.tuple(shape, f32[1, 3]).Tuple(pair, row)
            pair = shape.GetTupleElement(outer, tuple_index=0)
        element = f32[4, 3].GetTupleElement(pair, tuple_index=1)
        new = write_row(element, at, row)
        if aliased:
            new.set_alias_to(cache, must=True)
        return outputs(scribe, new, element)

    cache, row = torch.arange(12.0).reshape(4, 3), torch.tensor([[7.0, 8.0, 9.0]])
    buffer, updated = cache.clone(), cache.clone()
    updated[2] = row
    program = Program(module(graph), 1)
    new, element = (ranks[0] for ranks in program([[buffer], [row], [torch.tensor([2], dtype=torch.int32)]]))
    assert torch.equal(new, updated) and torch.equal(element, cache) and torch.equal(buffer, cache)
    assert buffer.data_ptr() not in (new.data_ptr(), element.data_ptr())


def test_an_output_never_shares_the_memory_of_a_parameter_it_is_not_aliased_to() -> None:
    def graph(scribe: Any) -> Any:
        a, b = (scribe.f32[2].Parameter(parameter_number=n) for n in range(2))
        first, second = scribe.f32[2].Reshape(b), scribe.f32[2].Reshape(a)
        first.set_alias_to(a), second.set_alias_to(b)
        return outputs(scribe, first, second)

    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    first, second = (ranks[0] for ranks in Program(module(graph), 1)([[a], [b]]))
    assert {first.data_ptr(), second.data_ptr()}.isdisjoint({a.data_ptr(), b.data_ptr()})
    assert torch.equal(first, b) and torch.equal(second, a)


def test_constants_are_not_overwritten() -> None:
    def graph(scribe: Any) -> Any:
        f32 = scribe.f32
        zeros = f32[4, 3].Broadcast(f32.Constant(constant_value=0), dimensions=[])
        at, row = scribe.s32[1].Parameter(parameter_number=0), f32[1, 3].Parameter(parameter_number=1)
        return write_row(zeros, at, row)

    program = Program(module(graph), 1)
    for index in range(4):
        ((result,),) = program([[torch.tensor([index], dtype=torch.int32)], [torch.ones(1, 3)]])
        assert result.sum() == 3 and result[index].sum() == 3


def collective(name: str, ranks: int, groups: list[list[int]], sizes: tuple[int, ...], **options: Any) -> Program:
    def graph(scribe: Any) -> Any:
        x = scribe.f32[6, 4].Parameter(parameter_number=0)
        if name in ("AllReduce", "ReduceScatter"):
            options["to_apply"] = addition(scribe.f32)
        return getattr(scribe.f32[sizes], name)(x, replica_groups=groups, **options)

    return Program(module(graph), ranks)


@given(st.permutations(range(4)), st.sampled_from([1, 2, 4]))
def test_collectives(order: list[int], size: int) -> None:
    groups = [list(order[i : i + size]) for i in range(0, 4, size)]
    values = [torch.randn(6, 4) for _ in range(4)]
    group_of = {rank: group for group in groups for rank in group}
    (reduced,) = collective("AllReduce", 4, groups, (6, 4))([values])
    (gathered,) = collective("AllGather", 4, groups, (6, 4 * size), dimensions=[1])([values])
    (scattered,) = collective("ReduceScatter", 4, groups, (6, 4 // size), dimensions=[1])([values])
    (exchanged,) = collective("AllToAll", 4, groups, (6, 4), dimensions=[1])([values])
    for rank in range(4):
        group = group_of[rank]
        position, width = group.index(rank), 4 // size
        total = sum(values[r] for r in group)
        assert torch.allclose(reduced[rank], total)
        assert torch.equal(gathered[rank], torch.cat([values[r] for r in group], 1))
        assert torch.allclose(scattered[rank], total[:, position * width : (position + 1) * width])
        received = [values[r][:, position * width : (position + 1) * width] for r in group]
        assert torch.equal(exchanged[rank], torch.cat(received, 1))
    first = groups[0]
    assert all(torch.equal(reduced[r], reduced[first[0]]) for r in first)


@pytest.mark.parametrize(("name", "bits", "reduced"), [("And", 4, [4, 0]), ("Or", 15, [6, 15])])
def test_integers_are_reduced_bit_by_bit(name: str, bits: int, reduced: list[int]) -> None:
    """Over the ranks, and over a dimension, with an initial value that has only some bits."""

    def graph(scribe: Any) -> Any:
        s32 = scribe.s32

        def combine(_: Any) -> Any:
            return getattr(s32, name)(s32.Parameter(parameter_number=0), s32.Parameter(parameter_number=1))

        x = s32[2, 2].Parameter(parameter_number=0)
        both = s32[2, 2].AllReduce(x, replica_groups=[[0, 1]], to_apply=combine)
        start = s32.Constant(constant_value=4 if name == "And" else 2)
        return outputs(scribe, both, s32[2].Reduce(x, start, dimensions=[0], to_apply=combine))

    x = torch.tensor([[4, 1], [6, 14]], dtype=torch.int32)
    both, folded = Program(module(graph), 2)([[x, torch.full_like(x, bits)]])
    assert torch.equal(both[0], x & bits if name == "And" else x | bits)
    assert folded[0].tolist() == reduced


def test_a_value_that_ranks_share_is_not_overwritten() -> None:
    def graph(scribe: Any) -> Any:
        f32 = scribe.f32
        x, at = f32[4, 3].Parameter(parameter_number=0), scribe.s32[1].Parameter(parameter_number=1)
        row = f32[1, 3].Parameter(parameter_number=2)
        total = f32[4, 3].AllReduce(x, replica_groups=[[0, 1]], to_apply=addition(f32))
        return write_row(total, at, row)

    indices = [torch.tensor([0], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)]
    ((a, b),) = Program(module(graph), 2)([[torch.ones(4, 3)] * 2, indices, [torch.zeros(1, 3)] * 2])
    assert a.sum(1).tolist() == [0, 6, 6, 6] and b.sum(1).tolist() == [6, 6, 6, 0]


def test_replica_groups_that_do_not_partition_the_ranks_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"all-reduce f32\[6,4\].*replica groups \[\[0, 1\]\] on 4 ranks"):
        collective("AllReduce", 4, [[0, 1]], (6, 4))


def test_an_unsupported_instruction_is_named_in_the_error() -> None:
    def unknown(scribe: Any) -> Any:
        x = scribe.bf16[2, 3].Parameter(parameter_number=0)
        return scribe.bf16[2, 3].Erf(x)

    with pytest.raises(UnsupportedError, match=r"HLO erf bf16\[2,3\]\(bf16\[2,3\]\) is not emulated"):
        Program(module(unknown), 1)

    def custom(scribe: Any) -> Any:
        return scribe.f32[3].CustomCall(scribe.f32[3].Parameter(parameter_number=0), custom_call_target="AwsNeuronNew")

    with pytest.raises(UnsupportedError, match=r"HLO custom-call AwsNeuronNew f32\[3\]"):
        Program(module(custom), 1)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rms_norm(dtype: str, dim: int) -> None:
    def graph(scribe: Any) -> Any:
        x = scribe.f32[3, 4, 5].Parameter(parameter_number=0)
        weight = getattr(scribe, dtype)[(3, 4, 5)[dim]].Parameter(parameter_number=1)
        epsilon = scribe.f32.Constant(constant_value=1e-5)
        call = {"custom_call_target": "AwsNeuronRmsNorm", "backend_config": str(dim).encode()}
        return getattr(scribe, dtype)[3, 4, 5].CustomCall(x, weight, epsilon, **call)

    settings = Settings()
    torch_dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    x, weight = torch.randn(3, 4, 5), torch.randn((3, 4, 5)[dim]).to(torch_dtype)
    ((actual,),) = Program(module(graph), 1, settings)([[x], [weight]])
    expected = torch.nn.functional.rms_norm(x.movedim(dim, -1), (len(weight),), weight.float(), 1e-5).movedim(-1, dim)
    assert torch.allclose(actual.float(), expected.to(torch_dtype).float(), rtol=1e-2 if dtype == "bf16" else 1e-5)
    assert settings.calls == {"AwsNeuronRmsNorm": 1}


def custom_call(name: str, config: str, source: str, result: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function that runs a graph of one custom call on a matrix of dtype ``source``."""

    def graph(scribe: Any) -> Any:
        x = getattr(scribe, source)[2, 4].Parameter(parameter_number=0)
        return result(scribe).CustomCall(x, custom_call_target=name, backend_config=config.encode())

    def run(x: torch.Tensor) -> torch.Tensor:
        ((result,),) = Program(module(graph), 1)([[x]])
        return result

    return run


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_softmax(dtype: str, dim: int) -> None:
    x = torch.tensor([[0.0, 1.0, -2.0, 3.0], [5.0, 5.0, -float("inf"), 4.0]])
    actual = custom_call("AwsNeuronSoftmax", str(dim), "f32", lambda s: getattr(s, dtype)[2, 4])(x)
    expected = (x.exp() / x.exp().sum(dim, keepdim=True)).to(actual.dtype)
    assert str(actual.dtype) == {"f32": "torch.float32", "bf16": "torch.bfloat16"}[dtype]
    torch.testing.assert_close(actual, expected)


def test_gelu() -> None:
    x = torch.tensor([[0.0, 1.0, -2.0, 3.0], [5.0, -5.0, 0.5, -0.1]])
    actual = custom_call("AwsNeuronGeluApprxTanh", "", "f32", lambda s: s.f32[2, 4])(x)
    cubic = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    torch.testing.assert_close(actual, x / 2 * (1 + cubic.tanh()), rtol=1e-5, atol=1e-6)
    assert abs(actual[0, 1] - 0.841192) < 1e-5  # the exact function has 0.841345


@pytest.mark.parametrize(("index", "stored"), [("u32", torch.int64), ("s32", torch.int32), ("u16", torch.int32)])
def test_the_indices_of_argmax_have_the_declared_type(index: str, stored: torch.dtype) -> None:
    x = torch.tensor([[0.0, 7.0, 7.0, 3.0], [5.0, -5.0, 0.5, 9.0]])
    actual = custom_call("AwsNeuronArgMax", "1", "f32", lambda s: getattr(s, index)[2])(x)
    assert actual.dtype is stored and actual.tolist() == [1, 3]


@pytest.mark.parametrize(("index", "stored"), [("u32", torch.int64), ("s32", torch.int32)])
def test_top_k(index: str, stored: torch.dtype) -> None:
    def graph(s: Any) -> Any:
        x, indices = s.f32[2, 4].Parameter(parameter_number=0), getattr(s, index)
        call = {"custom_call_target": "AwsNeuronTopK", "backend_config": b"2"}
        pair = s.tuple(s.f32[2, 2], indices[2, 2]).CustomCall(x, **call)
        first = s.f32[2, 2].GetTupleElement(pair, tuple_index=0)
        return outputs(s, first, indices[2, 2].GetTupleElement(pair, tuple_index=1))

    x = torch.tensor([[0.0, 7.0, 7.0, 3.0], [5.0, -5.0, 0.5, 9.0]])
    values, indices = (ranks[0] for ranks in Program(module(graph), 1)([[x]]))
    assert values.tolist() == [[7, 7], [9, 5]] and indices.tolist() == [[1, 2], [3, 0]]
    assert indices.dtype is stored


class HostKernel(nki.FrameworkKernel):  # type: ignore[name-defined, misc]
    def is_framework_tensor(self, value: Any) -> bool:
        return isinstance(value, HloShape)

    def map_framework_tensor(self, value: Any) -> tuple[tuple[int, ...], int]:
        return value.sizes, value.shape_proto.element_type

    def translate_to_neuron_dtype(self, dtype: int) -> Any:
        torch_dtype = DTYPES[dtype]
        return nl.bfloat16 if torch_dtype is torch.bfloat16 else np.dtype(str(torch_dtype).removeprefix("torch."))


def double_and_negate(x: Any, doubled: Any, negated: Any) -> None:
    tile = nl.load(x)
    nl.store(doubled, value=nl.multiply(tile, 2.0))
    nl.store(negated, value=nl.multiply(tile, -1.0))


def kernel_graph(name: str) -> Any:
    def graph(scribe: Any) -> Any:
        dtype = getattr(scribe, name)
        x = dtype[8, 3].Parameter(parameter_number=0)
        shapes = [dtype[8, 3], dtype[8, 3]]
        config, _, _ = HostKernel(func_name="double", func=double_and_negate).dump_config(x, *shapes)
        target = {"custom_call_target": "AwsNeuronCustomNativeKernel", "backend_config": config.encode()}
        both = scribe.tuple(*shapes).CustomCall(x, **target)
        return outputs(scribe, *(dtype[8, 3].GetTupleElement(both, tuple_index=i) for i in range(2)))

    return module(graph)


@pytest.mark.parametrize(("name", "largest"), [("u8", 2**8 - 1), ("u16", 2**16 - 1), ("u32", 2**32 - 1)])
def test_a_kernel_of_unsigned_integers_runs_in_a_graph(name: str, largest: int) -> None:
    """Their values are stored in a wider dtype; the kernel sees the declared one."""

    def copied(x: Any, y: Any) -> None:
        nl.store(y, value=nl.load(x))

    def graph(scribe: Any) -> Any:
        dtype = getattr(scribe, name)
        x, shape = dtype[1, 3].Parameter(parameter_number=0), dtype[1, 3]
        config, _, _ = HostKernel(func_name="copied", func=copied).dump_config(x, shape)
        target = {"custom_call_target": "AwsNeuronCustomNativeKernel", "backend_config": config.encode()}
        return dtype[1, 3].Add(x, shape.CustomCall(x, **target))

    x = torch.tensor([[1, 7, largest]], dtype=getattr(torch, name.replace("u", "uint")))
    ((doubled,),) = Program(module(graph), 1)([[x]])
    assert doubled.tolist() == [[2, 14, largest - 1]]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_kernel_runs_on_every_rank_and_is_counted(dtype: str) -> None:
    settings = Settings()
    values = [torch.randn(8, 3).to({"f32": torch.float32, "bf16": torch.bfloat16}[dtype]) for _ in range(2)]
    doubled, negated = Program(kernel_graph(dtype), 2, settings)([values])
    for rank in range(2):
        assert torch.equal(doubled[rank], values[rank] * 2) and torch.equal(negated[rank], -values[rank])
    assert settings.calls == {"nki": 2}


def test_a_kernels_reference_runs_if_the_settings_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings("reference")
    program = Program(kernel_graph("f32"), 1, settings)
    with pytest.raises(UnsupportedError, match="no attribute 'reference'"):
        program([[torch.ones(8, 3)]])
    monkeypatch.setattr(double_and_negate, "reference", lambda x: (x + 1, x + 2), raising=False)
    settings.calls.clear()
    (doubled,), (negated,) = program([[torch.ones(8, 3)]])
    assert doubled[0, 0] == 2 and negated[0, 0] == 3 and settings.calls == {"reference": 1}
    for wrong in (lambda x: (x.T, x), lambda x: (x, x.half())):
        monkeypatch.setattr(double_and_negate, "reference", wrong)
        with pytest.raises(InvalidGraphError, match=r"double_and_negate returned .*, not \(f32\[8,3\], f32\[8,3\]\)"):
            program([[torch.ones(8, 3)]])
