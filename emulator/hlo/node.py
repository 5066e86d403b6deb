"""One instruction of a graph as its implementation sees it, and the tables of implementations.

An implementation is made once, when a graph is loaded: it reads the instruction's attributes and returns a function
of the operands' values. A value is a tensor, or a tuple of values. XLA's unsigned types wider than 8 bits, which torch
hardly computes with, are held in the next wider signed type (``u64`` in int64, so up to 2^63).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from neuronmm.emulator.pyhlo.literal import DTYPES
from neuronmm.emulator.pyhlo.messages import PrimitiveType

Value = Any
Function = Callable[..., Value]

_HELD = {
    PrimitiveType.U16: torch.int32,
    PrimitiveType.U32: torch.int64,
    PrimitiveType.U64: torch.int64,
}
_MASKS = {PrimitiveType.U16: 0xFFFF, PrimitiveType.U32: 0xFFFFFFFF}


class UnsupportedError(NotImplementedError):
    """The graph holds an instruction that the emulator does not have."""


@dataclass
class Settings:
    """How custom NKI kernels run, and what ran: executions by custom-call target, summed over ranks.

    An NKI kernel counts as ``nki`` where it was interpreted and as ``reference`` where its torch reference ran.
    """

    kernels: Literal["nki", "reference"] = "nki"
    calls: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Node:
    """An instruction, its operands' shapes, those of their values that are constants, and what it may apply."""

    proto: Any
    operands: list[Any]
    constants: list[Value | None]
    computations: dict[int, Any]
    settings: Settings

    @property
    def sizes(self) -> tuple[int, ...]:
        """The result's dimensions."""
        return tuple(self.proto.shape.dimensions)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that holds the result."""
        return held(self.proto.shape.element_type)

    @property
    def mask(self) -> int | None:
        """The bits of the result's type, where its holder has more."""
        return _MASKS.get(self.proto.shape.element_type)

    def sizes_of(self, operand: int) -> tuple[int, ...]:
        """An operand's dimensions."""
        return tuple(self.operands[operand].dimensions)

    def wrapped(self, function: Function) -> Function:
        """``function`` with its result brought back into the range of an unsigned type."""
        mask = self.mask
        return function if mask is None else lambda *values: function(*values) & mask

    def applied(self) -> str:
        """The opcode that the applied computation is, on its parameters 0 and 1; ``second`` if it returns the latter.

        Raises:
            UnsupportedError: it is something else.
        """
        computation = self.computations[self.proto.called_computation_ids[0]]
        by_id = {i.id: i for i in computation.instructions}
        root = by_id[computation.root_id]
        if root.opcode == "parameter" and root.parameter_number == 1:
            return "second"
        operands = [by_id[i] for i in root.operand_ids]
        if [(o.opcode, o.parameter_number) for o in operands] == [("parameter", 0), ("parameter", 1)]:
            return str(root.comparison_direction if root.opcode == "compare" else root.opcode)
        raise self.unsupported("an applied computation of more than one instruction")

    def unsupported(self, what: str = "") -> UnsupportedError:
        """The error that names this instruction."""
        opcode = self.proto.opcode + (f" {self.proto.custom_call_target}" if self.proto.custom_call_target else "")
        operands = ", ".join(text(shape) for shape in self.operands)
        why = f": {what}" if what else ""
        return UnsupportedError(f"HLO {opcode} {text(self.proto.shape)}({operands}) is not emulated{why}")


LOCAL: dict[str, Callable[[Node], Function]] = {}
"""Opcode -> implementation on one rank's values."""
IN_PLACE: dict[str, Callable[[Node], Function]] = {}
"""Opcode -> implementation that overwrites its first operand and returns it."""
ACROSS: dict[str, Callable[[Node, int], Function]] = {}
"""Opcode -> implementation on all ranks' values: each operand, and the result, is a list with a value a rank."""
VIEWS: set[str] = set()
"""Opcodes whose result may share memory with their first operand."""


def local(*opcodes: str, view: bool = False) -> Callable[[Callable[[Node], Function]], Callable[[Node], Function]]:
    """Register an implementation for opcodes."""

    def register(make: Callable[[Node], Function]) -> Callable[[Node], Function]:
        LOCAL.update(dict.fromkeys(opcodes, make))
        if view:
            VIEWS.update(opcodes)
        return make

    return register


def held(element_type: int) -> torch.dtype:
    """The torch dtype that holds values of an XLA element type."""
    return _HELD.get(element_type) or DTYPES[element_type]


def entered(value: torch.Tensor, element_type: int) -> torch.Tensor | None:
    """``value``, from outside the graph, in the dtype that holds the element type; None if it is of another type.

    torch had no wide unsigned dtypes for long, so hosts keep such values in the signed dtype of the same width.
    """
    holder = held(element_type)
    if value.dtype is holder:
        return value
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32}.get(DTYPES[element_type])
    if element_type not in _HELD or value.dtype not in (DTYPES[element_type], signed):
        return None
    mask = _MASKS.get(element_type, -1)
    return value.to(holder) & mask


def text(shape: Any) -> str:
    """A shape as XLA writes it."""
    if shape.element_type == PrimitiveType.TUPLE:
        return f"({', '.join(text(s) for s in shape.tuple_shapes)})"
    return f"{PrimitiveType.Name(shape.element_type).lower()}[{','.join(map(str, shape.dimensions))}]"
