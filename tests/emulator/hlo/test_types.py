"""The type check refuses the graphs that XLA refuses and no others; a program checks its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import xla_oracle as xla
from neuronmm.emulator.hlo import InvalidGraphError, Program, UnsupportedError
from neuronmm.emulator.hlo.node import COLLECTIVES, IN_PLACE, LOCAL
from neuronmm.emulator.hlo.types import RULES, check
from neuronmm.emulator.pyhlo import HloScribe
from neuronmm.emulator.pyhlo.messages import PrimitiveType

Build = Callable[[Any], Any]


def graph_of(build: Build) -> Any:
    return HloScribe()(build).module_proto


def value(dtype: Any, sizes: tuple[int, ...] = (2, 3), number: int = 0) -> Any:
    return dtype[sizes].Parameter(parameter_number=number)


def combine(dtype: Any, name: str = "Add") -> Build:
    return lambda _: getattr(dtype, name)(*(dtype.Parameter(parameter_number=n) for n in range(2)))


def less(dtype: Any) -> Build:
    def compare(scribe: Any) -> Any:
        x, y = (dtype.Parameter(parameter_number=n) for n in range(2))
        return scribe.pred.Compare(x, y, comparison_direction="LT")

    return compare


def elementwise(*names: str, dtype: str, operands: int) -> Iterator[Build]:
    for name in names:
        yield lambda s, name=name: getattr(getattr(s, dtype)[2, 3], name)(
            *(value(getattr(s, dtype), number=n) for n in range(operands))
        )


DOT = {
    "lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0],
    "lhs_contracting_dimensions": [2], "rhs_contracting_dimensions": [1],
}  # fmt: skip
ROWS = {
    "update_window_dims": [1], "inserted_window_dims": [0], "scatter_dims_to_operand_dims": [0], "index_vector_dim": 1,
}  # fmt: skip
PICK = {"offset_dims": [1], "collapsed_slice_dims": [0], "start_index_map": [0], "index_vector_dim": 1}
EDGES = [{"edge_padding_low": 1, "edge_padding_high": 2, "interior_padding": n} for n in range(2)]
WINDOW = [
    {"size": n, "stride": 1, "padding_low": n - 1, "window_dilation": 1, "base_dilation": 1} for n in (1, 3)
]  # fmt: skip


def zero(dtype: Any) -> Any:
    return dtype.Constant(constant_value=0)


def sorted_pair(s: Any) -> Any:
    def compare(_: Any) -> Any:
        result = less(s.f32)(s)
        value(s.s32, (), 2), value(s.s32, (), 3)
        return result

    return s.tuple(s.f32[2, 3], s.s32[2, 3]).Sort(
        value(s.f32), s.s32[2, 3].Iota(dimensions=[1]), dimensions=[1], to_apply=compare
    )


def batch_norm(s: Any) -> Any:
    shape = s.tuple(s.f32[2, 3], s.f32[3], s.f32[3])
    result = shape.BatchNormTraining(value(s.f32), value(s.f32, (3,), 1), value(s.f32, (3,), 2), feature_index=1)
    return s.f32[3].GetTupleElement(result, tuple_index=2)


def pair(s: Any) -> Any:
    return s.tuple(s.f32[2, 3], s.bf16[4]).Tuple(value(s.f32), value(s.bf16, (4,), 1))


def strided_slice(s: Any) -> Any:
    slices = [{"start": 1, "limit": 2, "stride": 1}, {"limit": 3, "stride": 2}]
    return s.f32[1, 2].Slice(value(s.f32), slice_dimensions=slices)


def window(s: Any) -> Any:
    options = {"window": {"dimensions": WINDOW}, "to_apply": combine(s.f32)}
    return s.f32[2, 3].ReduceWindow(value(s.f32), zero(s.f32), **options)


def gather(s: Any) -> Any:
    options = {"gather_dimension_numbers": PICK, "gather_slice_sizes": [1, 3]}
    return s.f32[5, 3].Gather(value(s.f32), value(s.s32, (5,), 1), **options)


def scatter(s: Any) -> Any:
    options = {"scatter_dimension_numbers": ROWS, "to_apply": combine(s.f32)}
    return s.f32[2, 3].Scatter(value(s.f32), value(s.s32, (5,), 1), value(s.f32, (5, 3), 2), **options)


COLLECTIVE = {"replica_groups": [[0, 1]]}
GRAPHS: list[Build] = [
    *elementwise("Exp", "Cbrt", "Ceil", "Cos", "ExponentialMinusOne", "Floor", "Log", dtype="f32", operands=1),
    *elementwise("LogPlusOne", "Logistic", "RoundNearestEven", "Rsqrt", "Sin", "Sqrt", "Tanh", dtype="f32", operands=1),
    *elementwise("Abs", "Neg", "Sign", dtype="f32", operands=1),
    *elementwise("Not", dtype="s32", operands=1),
    *elementwise("Add", "Maximum", "Minimum", "Multiply", dtype="f32", operands=2),
    *elementwise("Divide", "Pow", "Remainder", "Subtract", dtype="bf16", operands=2),
    *elementwise("And", "Or", "Xor", dtype="pred", operands=2),
    *elementwise("ShiftLeft", "ShiftRightArithmetic", "ShiftRightLogical", dtype="s32", operands=2),
    *elementwise("Clamp", dtype="f32", operands=3),
    lambda s: s.pred[2, 3].Compare(value(s.f32), value(s.f32, number=1), comparison_direction="GT"),
    lambda s: s.f32[2, 3].Select(value(s.pred), value(s.f32, number=1), value(s.f32, number=2)),
    lambda s: s.s32[2, 3].Convert(value(s.bf16)),
    lambda s: s.f32[2, 3].Rng(zero(s.f32), zero(s.f32), distribution=1),
    lambda s: s.f32[4, 2, 5, 3].Broadcast(value(s.f32), dimensions=[1, 3]),
    lambda s: s.f32[3, 2].Reshape(value(s.f32)),
    lambda s: s.f32[3, 2].Transpose(value(s.f32), dimensions=[1, 0]),
    strided_slice,
    lambda s: s.f32[2, 3].Reverse(value(s.f32), dimensions=[1]),
    lambda s: s.f32[2, 7].Concatenate(value(s.f32), value(s.f32, (2, 4), 1), dimensions=[1]),
    lambda s: s.f32[5, 8].Pad(value(s.f32), zero(s.f32), padding_config={"dimensions": EDGES}),
    lambda s: s.f32[1, 2].DynamicSlice(value(s.f32), zero(s.s32), zero(s.s32), dynamic_slice_sizes=[1, 2]),
    lambda s: s.f32[2, 3].DynamicUpdateSlice(value(s.f32), value(s.f32, (1, 2), 1), zero(s.s32), zero(s.s32)),
    lambda s: s.f32[2, 3, 5].Dot(value(s.f32, (2, 3, 4)), value(s.f32, (2, 4, 5), 1), dot_dimension_numbers=DOT),
    lambda s: s.f32[2].Reduce(value(s.f32), zero(s.f32), dimensions=[1], to_apply=combine(s.f32)),
    window,
    lambda s: s.f32[2, 3].Sort(value(s.f32), dimensions=[1], to_apply=less(s.f32)),
    gather,
    scatter,
    lambda s: s.f32[2, 3].AllReduce(value(s.f32), to_apply=combine(s.f32), **COLLECTIVE),
    lambda s: s.f32[2, 6].AllGather(value(s.f32), dimensions=[1], **COLLECTIVE),
    lambda s: s.f32[1, 3].ReduceScatter(value(s.f32), dimensions=[0], to_apply=combine(s.f32), **COLLECTIVE),
    lambda s: s.f32[2, 3].AllToAll(value(s.f32), dimensions=[0], **COLLECTIVE),
    lambda s: s.u32.ReplicaId(),
    lambda s: s.f32[2, 3].CustomCall(value(s.f32), custom_call_target="AwsNeuronTransferWithStaticRing"),
    sorted_pair, batch_norm, pair,
]  # fmt: skip

STRICTER = {
    # XLA allows a reduction in a wider float type than the operand's; the emulator does not.
    *((name, "parameter.1", "element BF16") for name in ("reduce", "reduce-window", "all-reduce", "reduce-scatter")),
    ("scatter", "parameter.1", "element BF16"), ("scatter", "parameter.3", "element BF16"),
    # StableHLO, whose verifier answers here, stretches dimensions of 1 in a broadcast and accepts boolean indices;
    # HLO does neither.
    ("broadcast", "parameter.1", "size 0 is 1"), ("broadcast", "parameter.1", "size 1 is 1"),
    ("scatter", "parameter.2", "element PRED"),
    # StableHLO does not compare a collective's sizes with the number of ranks in a group.
    ("all-gather", "parameter.1", "size 1 is 1"),
    ("reduce-scatter", "parameter.1", "size 0 is 1"), ("reduce-scatter", "parameter.1", "size 0 is 3"),
    ("reduce-scatter", "reduce-scatter.2", "size 0 is 2"),
}  # fmt: skip
"""(Graph, changed instruction, change) that the check refuses and XLA's verifier accepts."""


def entry_of(module: Any) -> Any:
    return next(c for c in module.computations if c.id == module.entry_computation_id)


def changed(base: Any, position: int, change: Callable[[Any], None]) -> Any:
    """Return a copy of a module with one instruction's declared shape changed, and the program shape to match."""
    module = type(base)()
    module.CopyFrom(base)
    entry = entry_of(module)
    change(entry.instructions[position].shape)
    for shape in (entry.program_shape, module.host_program_shape):
        for instruction in entry.instructions:
            if instruction.opcode == "parameter":
                shape.parameters[instruction.parameter_number].CopyFrom(instruction.shape)
            if instruction.id == entry.root_id:
                shape.result.CopyFrom(instruction.shape)
    return module


def changes(shape: Any) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield (description, change) for other element types, sizes and ranks of a shape."""

    def element(shape: Any, number: int) -> None:
        shape.element_type = number

    def size(shape: Any, dimension: int, size: int) -> None:
        shape.dimensions[dimension] = size

    def rank(shape: Any, sizes: list[int]) -> None:
        del shape.dimensions[:], shape.layout.minor_to_major[:]
        shape.dimensions.extend(sizes)
        shape.layout.minor_to_major.extend(reversed(range(len(sizes))))

    for name in ("F32", "BF16", "S32", "PRED"):
        if PrimitiveType.Value(name) != shape.element_type:
            yield f"element {name}", lambda s, name=name: element(s, PrimitiveType.Value(name))
    for d, old in enumerate(shape.dimensions):
        for new in {1, old + 1} - {old}:
            yield f"size {d} is {new}", lambda s, d=d, new=new: size(s, d, new)
    for sizes in ([*shape.dimensions, 1], list(shape.dimensions[:-1])):
        if sizes != list(shape.dimensions):
            yield f"sizes {sizes}", lambda s, sizes=sizes: rank(s, sizes)


def refused(check: Callable[[], None]) -> bool:
    try:
        check()
    except (InvalidGraphError, UnsupportedError, xla.RefusedError):
        return True
    return False


@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: entry_of(graph_of(build)).instructions[-1].name)
def test_the_check_refuses_what_xla_refuses(build: Build) -> None:
    """Both accept the graph. With the declared type of any one instruction changed, both accept it or both refuse."""
    pytest.importorskip("jax")
    base = graph_of(build)
    check(base, 2)
    xla.verify(base)
    instructions = entry_of(base).instructions
    name, count = instructions[-1].opcode, 0
    for position, instruction in enumerate(instructions):
        if instruction.opcode in ("constant", "replica-id") or instruction.shape.element_type == PrimitiveType.TUPLE:
            continue  # XLA's reader would abort the process, or there is no single shape to change
        for description, change in changes(instruction.shape):
            module, count = changed(base, position, change), count + 1
            ours, theirs = refused(lambda m=module: check(m, 2)), refused(lambda m=module: xla.verify(m))
            # XLA leaves a custom call's type to its target.
            stricter = name == "custom-call" or (name, instruction.name, description) in STRICTER
            allowed = {(True, False)} if stricter else {(True, True), (False, False)}
            assert (ours, theirs) in allowed, (description, instruction.name)
    assert count > 5 or name == "replica-id"


def test_every_instruction_has_a_rule_and_every_rule_a_graph() -> None:
    opcodes = {i.opcode for build in GRAPHS for c in graph_of(build).computations for i in c.instructions}
    assert set(RULES) == opcodes
    assert {*LOCAL, *IN_PLACE, *COLLECTIVES} <= set(RULES)


def test_xla_verifies_the_graphs_of_every_test() -> None:
    """Even a graph with an instruction that the check does not know (conftest.py patches the verifier in)."""
    pytest.importorskip("jax")
    with pytest.raises(xla.RefusedError, match="Unknown opcode: fast-fourier"):
        Program(graph_of(lambda s: s.f32[2, 3].FastFourier(value(s.f32))), 1)


REFUSED: dict[str, Build] = {
    r"add.3 f32\[2,3\]\(bf16\[2,3\], f32\[2,3\]\) is invalid: both operands must have the same type": (
        lambda s: s.f32[2, 3].Add(value(s.bf16), value(s.f32, number=1))
    ),
    r"multiply.3 f32\[2,3\]\(f32\[2,3\], f32\[3\]\).*nothing is promoted or broadcast": (
        lambda s: s.f32[2, 3].Multiply(value(s.f32), value(s.f32, (3,), 1))
    ),
    r"its result is f32\[2,3\]": lambda s: s.f32[3, 2].Neg(value(s.f32)),
    r"its result is bf16\[2,3\]": lambda s: s.f32[2, 3].Neg(value(s.bf16)),
    r"the number of elements changes": lambda s: s.f32[5].Reshape(value(s.f32)),
    r"exponential.* it takes floats": lambda s: s.s32[2, 3].Exp(value(s.s32)),
    r"it takes 2 operands": lambda s: s.f32[2, 3].Add(value(s.f32)),
    r"dimensions \[1, 1\] of a value that has 2": lambda s: s.f32[3, 3].Transpose(value(s.f32), dimensions=[1, 1]),
    r"the weight must have 3 elements": lambda s: s.f32[2, 3].CustomCall(
        value(s.f32), value(s.f32, (2,), 1), zero(s.f32), custom_call_target="AwsNeuronRmsNorm", backend_config=b"1"
    ),
    r"custom-call.* its result is bf16\[2,3\]": lambda s: s.f32[2, 3].CustomCall(
        value(s.bf16), custom_call_target="AwsNeuronGeluApprxTanh"
    ),
    r"its result is u32\[2\]": lambda s: s.u32[3].CustomCall(
        value(s.f32), custom_call_target="AwsNeuronArgMax", backend_config=b"1"
    ),
    r"it compares by '', not by one of EQ": lambda s: s.pred[2, 3].Compare(value(s.f32), value(s.f32, number=1)),
    r"it compares by 'eq'": lambda s: s.pred[2, 3].Compare(
        value(s.f32), value(s.f32, number=1), comparison_direction="eq"
    ),
    r"its backend_config must be an integer, not b''": lambda s: s.f32[2, 3].CustomCall(
        value(s.f32), custom_call_target="AwsNeuronSoftmax"
    ),
    r"its backend_config must be an integer, not b'two'": lambda s: s.tuple(s.f32[2, 2], s.u32[2, 2]).CustomCall(
        value(s.f32), custom_call_target="AwsNeuronTopK", backend_config=b"two"
    ),
    r"the largest 4 of a last dimension of 3": lambda s: s.tuple(s.f32[2, 4], s.u32[2, 4]).CustomCall(
        value(s.f32), custom_call_target="AwsNeuronTopK", backend_config=b"4"
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_a_graph_is_refused_when_it_is_loaded(message: str) -> None:
    with pytest.raises(InvalidGraphError, match=message):
        Program(graph_of(REFUSED[message]), 1)


@pytest.mark.parametrize("name", ["F8E4M3FN", "F8E5M2", "C64"])
@pytest.mark.parametrize("position", [0, 1], ids=["parameter", "result"])
def test_an_element_type_without_a_dtype_is_refused_when_the_graph_is_loaded(name: str, position: int) -> None:
    module = graph_of(lambda s: s.bf16[2, 3].Convert(value(s.f32)))
    narrow = changed(module, position, lambda s: setattr(s, "element_type", PrimitiveType.Value(name)))
    with pytest.raises(UnsupportedError, match=rf"{name.lower()}\[2,3\] is not emulated"):
        Program(narrow, 1)


def test_an_applied_computation_is_checked() -> None:
    def graph(s: Any) -> Any:
        def mixed(_: Any) -> Any:
            return s.f32.Add(value(s.f32, ()), value(s.bf16, (), 1))

        return s.f32[2].Reduce(value(s.f32), zero(s.f32), dimensions=[1], to_apply=mixed)

    with pytest.raises(InvalidGraphError, match=r"f32\[\]\(f32\[\], bf16\[\]\)"):
        Program(graph_of(graph), 1)


def test_the_program_shape_and_the_aliases_are_checked() -> None:
    module = graph_of(lambda s: s.f32[2, 3].Neg(value(s.f32)))
    module.host_program_shape.parameters[0].dimensions[0] = 7
    with pytest.raises(InvalidGraphError, match="program shape"):
        Program(module, 1)

    def graph(s: Any) -> Any:
        x = value(s.f32)
        reshaped = s.f32[3, 2].Reshape(x)
        reshaped.set_alias_to(x)
        return s.tuple(s.f32[3, 2]).Tuple(reshaped)

    with pytest.raises(
        InvalidGraphError, match=r"output 0, f32\[3,2\], cannot share the memory of parameter 0, f32\[2,3\]"
    ):
        Program(graph_of(graph), 1)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([torch.ones(3, 2)], r"parameter 0 is f32\[2,3\] in the graph, but the input is float32\[3, 2\]"),
        ([torch.ones(3)], r"the input is float32\[3\]"),
        ([torch.ones(2, 3, dtype=torch.bfloat16)], r"the input is bfloat16\[2, 3\]"),
        ([torch.ones(2, 3)] * 2, "the graph has 1 parameters, not 2"),
    ],
)
def test_inputs_must_have_the_parameters_types(inputs: list[torch.Tensor], message: str) -> None:
    program = Program(graph_of(lambda s: s.f32[2, 3].Neg(value(s.f32))), 1)
    with pytest.raises(InvalidGraphError, match=message):
        program([[tensor] for tensor in inputs])


def test_a_wide_unsigned_input_may_have_the_signed_dtype() -> None:
    """Hosts store it so; the bits are the value's."""
    program = Program(graph_of(lambda s: s.s64[2].Convert(value(s.u32, (2,)))), 1)
    ((converted,),) = program([[torch.tensor([7, -1], dtype=torch.int32)]])
    assert converted.tolist() == [7, 2**32 - 1]
