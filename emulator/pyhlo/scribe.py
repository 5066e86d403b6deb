"""The scribe turns a Python function over typed shapes into an HloModuleProto; each call writes one instruction.

``scribe.f32[2, 3].Add(a, b)`` writes an instruction ``add`` with operands a and b and the result type f32[2,3]. Keyword
arguments set the instruction's attributes, named as XLA's fields, with two exceptions: ``to_apply`` is a function that
writes a computation, ``constant_value`` is a scalar.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from neuronmm.emulator.pyhlo.literal import DTYPES, serialize_torch
from neuronmm.emulator.pyhlo.messages import HloInstructionProto, HloModuleProto, Kind, PrimitiveType, ShapeProto

_SHORT = {"exp": "exponential", "sin": "sine", "cos": "cosine", "pow": "power", "neg": "negate"}
"""Short method name -> opcode."""


class HloShape:
    """A shape, or a value of that shape if an instruction produced it. ``scribe.f32`` is a scalar shape and a dtype.

    Attributes:
        scribe: the module's scribe.
        shape_proto: XLA's ShapeProto.
        instruction: the HloInstructionProto that produced the value; None for a shape.
        sizes: the tuple of dimensions.
    """

    def __init__(self, scribe: HloScribe, shape_proto: Any, instruction: Any = None) -> None:
        self.scribe, self.shape_proto, self.instruction = scribe, shape_proto, instruction
        self.sizes = tuple(shape_proto.dimensions)

    @property
    def dtype(self) -> HloShape:
        """The scalar shape of this element type; one object per scribe, so dtypes compare and hash by identity."""
        return self.scribe.get_dtype(self.shape_proto.element_type)

    def __getitem__(self, sizes: int | Iterable[int]) -> HloShape:
        dimensions = [int(n) for n in (sizes if isinstance(sizes, Iterable) else (sizes,))]
        return HloShape(self.scribe, _shape(self.shape_proto.element_type, dimensions))

    def __getattr__(self, name: str) -> Callable[..., HloShape]:
        if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name):
            raise AttributeError(f"HloShape has no attribute {name}")
        words = re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()
        opcode = _SHORT.get(words, words)

        def instruction(*operands: HloShape, **attributes: Any) -> HloShape:
            return self.scribe.write(opcode, self, operands, attributes)

        return instruction

    def get_tuple_element(self, index: int) -> HloShape:
        """Return the shape of an element of this tuple; writes no instruction."""
        return HloShape(self.scribe, self.shape_proto.tuple_shapes[index])

    def set_alias_to(self, parameter: HloShape, must: bool = False) -> None:
        """Declare that this value, an output of the module, shares the memory of ``parameter``.

        Raises:
            TypeError: ``parameter`` is not a parameter.
        """
        if parameter.instruction is None or parameter.instruction.opcode != "parameter":
            raise TypeError("set_alias_to: only a parameter has memory to share")
        kind = Kind.MUST_ALIAS if must else Kind.MAY_ALIAS
        self.scribe.aliases.append((self.instruction.id, parameter.instruction.parameter_number, kind))

    def __repr__(self) -> str:
        name = PrimitiveType.Name(self.shape_proto.element_type).lower()
        return f"{name}{list(self.sizes)}" + (f" {self.instruction.name}" if self.instruction else "")


class HloScribe:
    """Writes one module: ``HloScribe(serialize)(function).module_proto``.

    ``serialize(tensor)`` returns a constant's LiteralProto. ``function(scribe)`` writes the entry computation and
    returns its root value.
    """

    def __init__(self, serialize: Callable[[torch.Tensor], Any] = serialize_torch) -> None:
        self.serialize = serialize
        self.module_proto = HloModuleProto()
        self.aliases: list[tuple[int, int, int]] = []
        self._dtypes: dict[int, HloShape] = {}
        self._last_id = 0
        self._open: list[list[Any]] = []

    def __getattr__(self, name: str) -> HloShape:
        if name.upper() not in PrimitiveType.keys() or name != name.lower():  # noqa: SIM118 - no mapping
            raise AttributeError(f"HloScribe has no dtype {name}")
        return self.get_dtype(name)

    def get_dtype(self, name: str | int) -> HloShape:
        """Return the dtype with XLA's name, in lower case, or XLA's number."""
        number = PrimitiveType.Value(name.upper()) if isinstance(name, str) else name
        if number not in self._dtypes:
            self._dtypes[number] = HloShape(self, _shape(number, []))
        return self._dtypes[number]

    def tuple(self, *shapes: HloShape) -> HloShape:
        """Return the shape of a tuple of ``shapes``."""
        proto = ShapeProto(element_type=PrimitiveType.TUPLE)
        for shape in shapes:
            proto.tuple_shapes.add().CopyFrom(shape.shape_proto)
        return HloShape(self, proto)

    def __call__(self, function: Callable[[HloScribe], HloShape]) -> HloScribe:
        module = self.module_proto
        module.name = re.sub(r"\W", "_", getattr(function, "__name__", "module"))
        entry = self._computation(function, module.name)
        module.entry_computation_name, module.entry_computation_id, module.id = entry.name, entry.id, 0
        module.host_program_shape.CopyFrom(entry.program_shape)
        self._write_aliases(entry)
        return self

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _computation(self, function: Callable[[HloScribe], HloShape], name: str) -> Any:
        instructions: list[Any] = []
        self._open.append(instructions)
        root = function(self)
        self._open.pop()
        computation = self.module_proto.computations.add(id=self._next_id())
        computation.name = f"{name}.{computation.id}"
        computation.instructions.extend(instructions)
        computation.root_id = root.instruction.id
        parameters = sorted(
            (i for i in instructions if i.opcode == "parameter"), key=lambda parameter: parameter.parameter_number
        )
        for number, parameter in enumerate(parameters):
            if parameter.parameter_number != number:
                raise ValueError(f"{name}: parameter {number} is missing or written twice")
            computation.program_shape.parameters.add().CopyFrom(parameter.shape)
            computation.program_shape.parameter_names.append(parameter.name)
        computation.program_shape.result.CopyFrom(root.shape_proto)
        return computation

    def write(self, opcode: str, shape: HloShape, operands: Sequence[HloShape], attributes: dict[str, Any]) -> HloShape:
        """Append an instruction to the open computation and return its value.

        Raises:
            TypeError: an operand is not a value.
        """
        instruction = HloInstructionProto()
        instruction.id = self._next_id()
        instruction.name, instruction.opcode = f"{opcode}.{instruction.id}", opcode
        instruction.shape.CopyFrom(shape.shape_proto)
        for number, operand in enumerate(operands):
            if not isinstance(operand, HloShape) or operand.instruction is None:
                raise TypeError(f"{opcode}: operand {number} is {operand!r}, not a value of this graph")
            instruction.operand_ids.append(operand.instruction.id)
        attributes = dict(attributes)
        if "to_apply" in attributes:
            computation = self._computation(attributes.pop("to_apply"), opcode)
            instruction.called_computation_ids.append(computation.id)
        if "constant_value" in attributes:
            dtype = DTYPES[shape.shape_proto.element_type]
            instruction.literal.CopyFrom(self.serialize(torch.tensor(attributes.pop("constant_value"), dtype=dtype)))
        if "replica_groups" in attributes:
            groups = attributes.pop("replica_groups")
            attributes["replica_groups"] = [{"replica_ids": list(group)} for group in groups]
        for name, value in attributes.items():
            _assign(instruction, name, value)
        self._open[-1].append(instruction)
        return HloShape(self, instruction.shape, instruction)

    def _write_aliases(self, entry: Any) -> None:
        (root,) = (i for i in entry.instructions if i.id == entry.root_id)
        outputs = list(root.operand_ids) if root.opcode == "tuple" else [root.id]
        for instruction, parameter, kind in self.aliases:
            if instruction not in outputs:
                raise ValueError(f"a value that shares memory with parameter {parameter} is not an output")
            index = [outputs.index(instruction)] if root.opcode == "tuple" else []
            self.module_proto.input_output_alias.entries.add(
                output_shape_index=index, parameter_number=parameter, kind=kind
            )


def _shape(element_type: int, dimensions: list[int]) -> Any:
    proto = ShapeProto(element_type=element_type, dimensions=dimensions)
    proto.layout.minor_to_major.extend(reversed(range(len(dimensions))))
    return proto


def _assign(message: Any, name: str, value: Any) -> None:
    """Set a field from plain Python values: a dictionary is a message, a sequence a repeated field."""
    field = getattr(message, name)
    if isinstance(value, dict):
        for key, item in value.items():
            _assign(field, key, item)
        field.SetInParent()
    elif hasattr(field, "add"):
        for item in value:
            element = field.add()
            for key, part in item.items():
                _assign(element, key, part)
    elif hasattr(field, "extend"):
        field.extend(item.item() if hasattr(item, "item") else item for item in value)
    else:
        setattr(message, name, value)
