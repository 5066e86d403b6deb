"""The type check of a graph before it runs: each instruction's operands, and the declared type of its result.

The rules are XLA's (operation semantics, openxla.org/xla/operation_semantics): an instruction neither promotes element
types nor broadcasts; only ``convert`` and ``broadcast`` do. torch is more lenient, so without this check a graph could
run here that a compiler refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from neuronmm.emulator.pyhlo.literal import DTYPES
from neuronmm.emulator.pyhlo.messages import PrimitiveType


class InvalidGraphError(ValueError):
    """XLA refuses the graph: the type of an operand or a result breaks an instruction's rule."""


class UnsupportedError(NotImplementedError):
    """The graph contains an instruction that is not emulated."""


class Type(NamedTuple):
    """An element type (XLA's number) and dimensions; a tuple has ``parts``, the types of its elements."""

    element: int
    sizes: tuple[int, ...] = ()
    parts: tuple[Any, ...] = ()

    @classmethod
    def of(cls, shape: Any) -> Type:
        """Return the type of a ShapeProto."""
        return cls(shape.element_type, tuple(shape.dimensions), tuple(cls.of(part) for part in shape.tuple_shapes))

    @property
    def scalar(self) -> Type:
        """The scalar type of this element type."""
        return Type(self.element)

    def resized(self, sizes: Sequence[int]) -> Type:
        """Return a type of the same element type with other dimensions."""
        return Type(self.element, tuple(sizes))

    def __str__(self) -> str:
        if self.element == PrimitiveType.TUPLE:
            return f"({', '.join(map(str, self.parts))})"
        return f"{PrimitiveType.Name(self.element).lower()}[{','.join(map(str, self.sizes))}]"


PRED, U32 = Type(PrimitiveType.PRED), Type(PrimitiveType.U32)
FLOATS = {PrimitiveType.F16, PrimitiveType.BF16, PrimitiveType.F32, PrimitiveType.F64}
INTEGERS = {
    PrimitiveType.S8, PrimitiveType.S16, PrimitiveType.S32, PrimitiveType.S64,
    PrimitiveType.U8, PrimitiveType.U16, PrimitiveType.U32, PrimitiveType.U64,
}  # fmt: skip


def tuple_of(*parts: Type) -> Type:
    """Return the type of a tuple."""
    return Type(PrimitiveType.TUPLE, (), parts)


def one_or_tuple(parts: Sequence[Type]) -> Type:
    """Return the result type of an instruction that takes one or several operands: one type, or a tuple."""
    return parts[0] if len(parts) == 1 else tuple_of(*parts)


@dataclass(frozen=True)
class Instruction:
    """An instruction as its rule sees it.

    Attributes:
        proto: its HloInstructionProto.
        declared: the declared type of its result.
        operands: the types of its operands.
        applied: (parameters' types, result's type) of each computation that it applies.
        ranks: the number of ranks that the program runs on.
    """

    proto: Any
    declared: Type
    operands: list[Type]
    applied: list[tuple[list[Type], Type]]
    ranks: int

    def take(self, count: int) -> list[Type]:
        """Return the operands; there must be exactly ``count``."""
        self.require(len(self.operands) == count, f"it takes {count} operands")
        return self.operands

    def require(self, condition: bool, problem: str) -> None:
        """Raise :class:`InvalidGraphError` with this instruction and ``problem`` unless ``condition`` holds."""
        if not condition:
            raise InvalidGraphError(f"HLO {self} is invalid: {problem}")

    def require_accumulators(self, actual: Sequence[Type], expected: Sequence[Type], problem: str) -> None:
        """Check the types of a reduction. XLA lets them differ in float precision; the emulator does not.

        Raises:
            UnsupportedError: the types differ in float precision only.
            InvalidGraphError: the types differ in more than that.
        """
        self.require(_without_precision(actual) == _without_precision(expected), problem)
        if list(actual) != list(expected):
            raise UnsupportedError(f"HLO {self} is not emulated: it reduces in another precision than its operand's")

    def require_dimensions(self, numbers: Sequence[int], count: int) -> list[int]:
        """Return ``numbers`` as a list; they must be distinct dimensions of a value with ``count`` dimensions."""
        valid = len(set(numbers)) == len(numbers) and all(0 <= number < count for number in numbers)
        self.require(valid, f"dimensions {list(numbers)} of a value that has {count}")
        return list(numbers)

    def require_computation(self, parameters: Sequence[Type], result: Type) -> None:
        """Check the type of the one computation that the instruction applies."""
        problem = f"the computation it applies must be {', '.join(map(str, parameters))} -> {result}"
        self.require(len(self.applied) == 1, problem)
        ((actual_parameters, actual_result),) = self.applied
        self.require_accumulators([*actual_parameters, actual_result], [*parameters, result], problem)

    def __str__(self) -> str:
        return f"{self.proto.name} {self.declared}({', '.join(map(str, self.operands))})"


def _without_precision(types: Sequence[Type]) -> list[Type]:
    """Return the types with every float element type replaced by F32."""
    return [t._replace(element=PrimitiveType.F32) if t.element in FLOATS else t for t in types]


RULES: dict[str, Callable[[Instruction], Type]] = {}
"""Opcode -> rule: it checks the operands and returns the type that the result must be declared with."""


def rule(*opcodes: str) -> Callable[[Callable[[Instruction], Type]], Callable[[Instruction], Type]]:
    """Register a rule in :data:`RULES`."""

    def register(check: Callable[[Instruction], Type]) -> Callable[[Instruction], Type]:
        RULES.update(dict.fromkeys(opcodes, check))
        return check

    return register


def check(module: Any, ranks: int) -> None:
    """Check an HloModuleProto: every instruction that has a rule, the program's declared shape, and its aliases.

    Raises:
        InvalidGraphError: XLA would refuse the graph; names the first such instruction in the module's order.
        UnsupportedError: an element type has no dtype, or a reduction has another precision than its operand.
    """
    signatures: dict[int, tuple[list[Type], Type]] = {}
    for computation in module.computations:
        signatures[computation.id] = _check_computation(computation, signatures, ranks)
    parameters, result = signatures[module.entry_computation_id]
    shape = module.host_program_shape
    declared = [Type.of(parameter) for parameter in shape.parameters], Type.of(shape.result)
    if declared != (parameters, result):
        raise InvalidGraphError(f"{module.name}: the program shape is not that of the entry computation")
    outputs = result.parts if result.element == PrimitiveType.TUPLE else (result,)
    for entry in module.input_output_alias.entries:
        (output,) = entry.output_shape_index or [0]
        if outputs[output] != parameters[entry.parameter_number]:
            raise InvalidGraphError(
                f"{module.name}: output {output}, {outputs[output]}, cannot share the memory of parameter "
                f"{entry.parameter_number}, {parameters[entry.parameter_number]}"
            )


def _is_stored(declared: Type) -> bool:
    """Return whether the emulator has a dtype for a type, or for all parts of a tuple."""
    if declared.element == PrimitiveType.TUPLE:
        return all(map(_is_stored, declared.parts))
    return declared.element in DTYPES


def _check_computation(
    computation: Any, signatures: dict[int, tuple[list[Type], Type]], ranks: int
) -> tuple[list[Type], Type]:
    """Check a computation; return the types of its parameters and of its result."""
    types: dict[int, Type] = {}
    parameters: dict[int, Type] = {}
    for proto in computation.instructions:
        declared = Type.of(proto.shape)
        if not _is_stored(declared):
            raise UnsupportedError(f"HLO {proto.name} {declared} is not emulated: no dtype stores its element type")
        missing = [number for number in proto.operand_ids if number not in types]
        if missing:
            raise InvalidGraphError(f"HLO {proto.name} reads {missing}, which no earlier instruction defines")
        operands = [types[number] for number in proto.operand_ids]
        applied = [signatures[number] for number in proto.called_computation_ids]
        if proto.opcode in RULES:
            instruction = Instruction(proto, declared, operands, applied, ranks)
            inferred = RULES[proto.opcode](instruction)
            instruction.require(inferred == declared, f"its result is {inferred}")
        if proto.opcode == "parameter":
            parameters[proto.parameter_number] = declared
        types[proto.id] = declared
    return [parameters[number] for number in sorted(parameters)], types[computation.root_id]
