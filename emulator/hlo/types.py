"""The type check of a graph before it runs: each instruction's operands, and the declared type of its result.

The rules are XLA's (its operation semantics, openxla.org/xla/operation_semantics): an instruction does not promote
element types and does not broadcast; only ``convert`` and ``broadcast`` do. torch is more lenient: without the check, a
graph could run here that a compiler refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from neuronmm.emulator.hlo.node import UnsupportedError
from neuronmm.emulator.pyhlo.messages import PrimitiveType


class InvalidGraphError(ValueError):
    """XLA refuses the graph: an operand's or a result's type breaks an instruction's rule."""


class Type(NamedTuple):
    """An element type, by XLA's number, and dimensions; for a tuple its ``parts``."""

    element: int
    sizes: tuple[int, ...] = ()
    parts: tuple[Any, ...] = ()

    @classmethod
    def of(cls, shape: Any) -> Type:
        """The type that a ShapeProto says."""
        return cls(shape.element_type, tuple(shape.dimensions), tuple(cls.of(part) for part in shape.tuple_shapes))

    @property
    def scalar(self) -> Type:
        """The scalar of this element type."""
        return Type(self.element)

    def resized(self, sizes: Sequence[int]) -> Type:
        """This element type with other dimensions."""
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
    """The type of a tuple."""
    return Type(PrimitiveType.TUPLE, (), parts)


def together(parts: Sequence[Type]) -> Type:
    """The result of an instruction that takes one operand or several: one value, or a tuple of them."""
    return parts[0] if len(parts) == 1 else tuple_of(*parts)


@dataclass(frozen=True)
class Use:
    """An instruction as its rule sees it: its message, the declared type, its operands' types, the types of the
    computations it applies (parameters and result), and the number of ranks."""

    proto: Any
    declared: Type
    operands: list[Type]
    applied: list[tuple[list[Type], Type]]
    ranks: int

    def take(self, count: int) -> list[Type]:
        """The operands, of which there have to be ``count``."""
        self.need(len(self.operands) == count, f"it takes {count} operands")
        return self.operands

    def need(self, condition: bool, otherwise: str) -> None:
        """Raise :class:`InvalidGraphError` with the instruction and ``otherwise`` if the condition does not hold."""
        if not condition:
            raise InvalidGraphError(f"HLO {self} is invalid: {otherwise}")

    def accumulates(self, found: Sequence[Type], wanted: Sequence[Type], what: str) -> None:
        """Check types of a reduction, which XLA also lets differ in floating-point precision; that is not emulated.

        Raises:
            UnsupportedError: ``found`` is ``wanted`` in another floating-point precision.
            InvalidGraphError: they differ in more than that.
        """
        self.need(_without_precision(found) == _without_precision(wanted), what)
        if list(found) != list(wanted):
            raise UnsupportedError(f"HLO {self} is not emulated: it reduces in another precision than its operand's")

    def dimensions(self, numbers: Sequence[int], rank: int) -> list[int]:
        """``numbers``, which have to be different dimensions of a value with ``rank`` of them."""
        good = len(set(numbers)) == len(numbers) and all(0 <= number < rank for number in numbers)
        self.need(good, f"dimensions {list(numbers)} of a value that has {rank}")
        return list(numbers)

    def applies(self, parameters: Sequence[Type], result: Type) -> None:
        """Check the type of the computation that the instruction applies."""
        wanted = f"the computation it applies has to be {', '.join(map(str, parameters))} -> {result}"
        self.need(len(self.applied) == 1, wanted)
        ((given, made),) = self.applied
        self.accumulates([*given, made], [*parameters, result], wanted)

    def __str__(self) -> str:
        return f"{self.proto.name} {self.declared}({', '.join(map(str, self.operands))})"


def _without_precision(types: Sequence[Type]) -> list[Type]:
    """The types with every floating-point element type the same one."""
    return [t._replace(element=PrimitiveType.F32) if t.element in FLOATS else t for t in types]


RULES: dict[str, Callable[[Use], Type]] = {}
"""Opcode -> the check of its operands; returns the type that the result has to be declared with."""


def rule(*opcodes: str) -> Callable[[Callable[[Use], Type]], Callable[[Use], Type]]:
    """Register a rule for opcodes."""

    def register(check: Callable[[Use], Type]) -> Callable[[Use], Type]:
        RULES.update(dict.fromkeys(opcodes, check))
        return check

    return register


def check(module: Any, ranks: int) -> None:
    """Check every instruction of every computation whose opcode is emulated, and the program's declared interface.

    Raises:
        InvalidGraphError: the first instruction, in the module's order, that XLA would refuse.
        UnsupportedError: a reduction in another precision than its operand's.
    """
    signatures: dict[int, tuple[list[Type], Type]] = {}
    for computation in module.computations:
        signatures[computation.id] = _check_computation(computation, signatures, ranks)
    parameters, result = signatures[module.entry_computation_id]
    shape = module.host_program_shape
    declared = [Type.of(parameter) for parameter in shape.parameters], Type.of(shape.result)
    if declared != (parameters, result):
        raise InvalidGraphError(f"{module.name}: its program shape is not that of its entry computation")
    outputs = result.parts if result.element == PrimitiveType.TUPLE else (result,)
    for entry in module.input_output_alias.entries:
        (output,) = entry.output_shape_index or [0]
        if outputs[output] != parameters[entry.parameter_number]:
            raise InvalidGraphError(
                f"{module.name}: output {output}, {outputs[output]}, cannot lie in the memory of parameter "
                f"{entry.parameter_number}, {parameters[entry.parameter_number]}"
            )


def _check_computation(
    computation: Any, signatures: dict[int, tuple[list[Type], Type]], ranks: int
) -> tuple[list[Type], Type]:
    """The types of a computation's parameters and of its result."""
    types: dict[int, Type] = {}
    parameters: dict[int, Type] = {}
    for instruction in computation.instructions:
        declared = Type.of(instruction.shape)
        missing = [number for number in instruction.operand_ids if number not in types]
        if missing:
            raise InvalidGraphError(f"HLO {instruction.name} reads {missing}, which no instruction before it makes")
        operands = [types[number] for number in instruction.operand_ids]
        applied = [signatures[number] for number in instruction.called_computation_ids]
        use = Use(instruction, declared, operands, applied, ranks)
        if instruction.opcode in RULES:
            made = RULES[instruction.opcode](use)
            use.need(made == declared, f"its result is {made}")
        if instruction.opcode == "parameter":
            parameters[instruction.parameter_number] = declared
        types[instruction.id] = declared
    return [parameters[number] for number in sorted(parameters)], types[computation.root_id]
