"""An instruction as its implementation sees it, and the tables of implementations.

An implementation is a factory. When a graph is loaded, the factory reads the instruction's attributes and returns a
function of the operands' values. A value is a tensor or a tuple of values.

torch supports few operations on unsigned types wider than 8 bits. Their values are stored in a wider signed type:
``u16`` in int32, ``u32`` in int64, ``u64`` in int64 (so only values below 2^63 are correct).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from neuronmm.emulator.hlo.types import Type, UnsupportedError
from neuronmm.emulator.pyhlo.literal import DTYPES
from neuronmm.emulator.pyhlo.messages import PrimitiveType

Value = Any
Function = Callable[..., Value]

_WIDER_STORAGE = {
    PrimitiveType.U16: torch.int32,
    PrimitiveType.U32: torch.int64,
    PrimitiveType.U64: torch.int64,
}
_MASKS = {PrimitiveType.U16: 0xFFFF, PrimitiveType.U32: 0xFFFFFFFF}


@dataclass
class Settings:
    """How NKI kernels run, and a count of the custom calls that ran, by target and summed over ranks.

    An NKI kernel counts as ``nki`` if it was interpreted and as ``reference`` if its torch reference ran instead.
    """

    kernels: Literal["nki", "reference"] = "nki"
    calls: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Node:
    """An instruction of the graph.

    Attributes:
        proto: its HloInstructionProto.
        operands: the operands' ShapeProtos.
        constants: the operands' values where they are constants, else None.
        computations: the module's computations by id, for instructions that apply one.
        settings: how custom calls run.
    """

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
        """The dtype that stores the result."""
        return storage_dtype(self.proto.shape.element_type)

    @property
    def mask(self) -> int | None:
        """The bits of the result's type, if its storage dtype has more."""
        return _MASKS.get(self.proto.shape.element_type)

    def sizes_of(self, operand: int) -> tuple[int, ...]:
        """Return an operand's dimensions."""
        return tuple(self.operands[operand].dimensions)

    def wrap(self, function: Function) -> Function:
        """Return ``function`` with its result reduced to the range of the result's unsigned type."""
        mask = self.mask
        return function if mask is None else lambda *values: function(*values) & mask

    def applied_opcode(self) -> str:
        """Return the opcode of the one instruction that the applied computation runs on its parameters 0 and 1.

        A comparison gives its direction; a computation that returns parameter 1 gives ``second``.

        Raises:
            UnsupportedError: the computation is anything else.
        """
        computation = self.computations[self.proto.called_computation_ids[0]]
        by_id = {i.id: i for i in computation.instructions}
        root = by_id[computation.root_id]
        if root.opcode == "parameter" and root.parameter_number == 1:
            return "second"
        operands = [by_id[i] for i in root.operand_ids]
        if [(o.opcode, o.parameter_number) for o in operands] == [("parameter", 0), ("parameter", 1)]:
            return str(root.comparison_direction if root.opcode == "compare" else root.opcode)
        raise self.unsupported("it applies a computation of more than one instruction")

    def unsupported(self, reason: str = "") -> UnsupportedError:
        """Return an error that names this instruction, its types and the reason."""
        opcode = self.proto.opcode + (f" {self.proto.custom_call_target}" if self.proto.custom_call_target else "")
        operands = ", ".join(str(Type.of(shape)) for shape in self.operands)
        suffix = f": {reason}" if reason else ""
        return UnsupportedError(f"HLO {opcode} {Type.of(self.proto.shape)}({operands}) is not emulated{suffix}")


LOCAL: dict[str, Callable[[Node], Function]] = {}
"""Opcode -> implementation on one rank's values."""
IN_PLACE: dict[str, Callable[[Node], Function]] = {}
"""Opcode -> implementation that overwrites its first operand and returns it."""
COLLECTIVES: dict[str, Callable[[Node, int], Function]] = {}
"""Opcode -> implementation on all ranks' values: each operand, and the result, is a list with one value per rank."""
VIEWS: set[str] = set()
"""Opcodes whose result may share memory with their first operand."""


def local(*opcodes: str, view: bool = False) -> Callable[[Callable[[Node], Function]], Callable[[Node], Function]]:
    """Register an implementation in :data:`LOCAL`, and with ``view`` in :data:`VIEWS`."""

    def register(factory: Callable[[Node], Function]) -> Callable[[Node], Function]:
        LOCAL.update(dict.fromkeys(opcodes, factory))
        if view:
            VIEWS.update(opcodes)
        return factory

    return register


def storage_dtype(element_type: int) -> torch.dtype:
    """Return the torch dtype that stores values of an XLA element type."""
    return _WIDER_STORAGE.get(element_type) or DTYPES[element_type]


def from_storage(value: torch.Tensor, element_type: int) -> torch.Tensor:
    """Convert a value of the graph from its storage dtype to the dtype that ``element_type`` declares."""
    return value.to(DTYPES[element_type])


def to_storage(value: torch.Tensor, element_type: int) -> torch.Tensor | None:
    """Convert an input of the graph to the storage dtype of ``element_type``; None if its dtype does not match.

    Hosts may pass a wide unsigned value in the signed dtype of the same width, with the same bits.
    """
    storage = storage_dtype(element_type)
    if value.dtype is storage:
        return value
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32}.get(DTYPES[element_type])
    if element_type not in _WIDER_STORAGE or value.dtype not in (DTYPES[element_type], signed):
        return None
    mask = _MASKS.get(element_type, -1)
    return value.to(storage) & mask
