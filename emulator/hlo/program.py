"""A graph that is planned once and then runs on tensors without reading its messages again.

Planning folds constants, calls every instruction's factory, finds the last read of every value, and lets an update
(scatter, dynamic-update-slice) overwrite its operand where no other value can observe it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuronmm.emulator.hlo import (
    collectives,
    custom,
    elementwise,
    indexing,
    reducing,
    rules,
    rules_combining,
    shaping,
)
from neuronmm.emulator.hlo.memory import NEVER_CONSTANT, MemoryPlan, plan_memory
from neuronmm.emulator.hlo.node import COLLECTIVES, IN_PLACE, LOCAL, Function, Node, Settings, to_storage
from neuronmm.emulator.hlo.types import InvalidGraphError, Type, check

IMPLEMENTATIONS = (collectives, custom, elementwise, indexing, reducing, shaping)
"""The modules that fill the tables of :mod:`.node`."""
TYPE_RULES = (rules, rules_combining)
"""The modules that fill the table of :mod:`.types`."""


class _Step(NamedTuple):
    """One instruction: its function, the slots of its operands and result, and the slots that no later step reads."""

    function: Function
    operands: tuple[int, ...]
    result: int
    collective: bool
    freed: tuple[int, ...]


class Program:
    """An HloModuleProto, ready to run on ``ranks`` ranks.

    Attributes:
        module: the HloModuleProto.
        aliases: output number -> number of the parameter whose memory it shares.

    Raises:
        InvalidGraphError: a type breaks an instruction's rule, so XLA would refuse the graph.
        UnsupportedError: an instruction is not emulated.
    """

    def __init__(self, module: Any, ranks: int, settings: Settings | None = None) -> None:
        check(module, ranks)
        self.module, self.ranks, self.settings = module, ranks, settings or Settings()
        entry = _entry(module)
        self.aliases = {
            (list(e.output_shape_index) or [0])[0]: e.parameter_number for e in module.input_output_alias.entries
        }
        by_id = {i.id: i for i in entry.instructions}
        self._slots = {number: slot for slot, number in enumerate(by_id)}
        self._outputs = [self._slots[i] for i in _output_ids(entry)]
        self._inputs = {i.parameter_number: self._slots[i.id] for i in entry.instructions if i.opcode == "parameter"}
        self._shapes = list(module.host_program_shape.parameters)
        instructions = live_instructions(module)
        memory = plan_memory(instructions, self._slots, self._inputs, self._outputs, self.aliases)
        self._copied_outputs = memory.copied_outputs
        self._constants: dict[int, Any] = {}
        self._steps: list[_Step] = []
        computations = {c.id: c for c in module.computations}
        for instruction in instructions:
            if instruction.opcode != "parameter":
                self._plan(instruction, by_id, computations, memory)

    def _plan(self, instruction: Any, by_id: dict[int, Any], computations: dict[int, Any], memory: MemoryPlan) -> None:
        opcode, slot = instruction.opcode, self._slots[instruction.id]
        operands = tuple(self._slots[i] for i in instruction.operand_ids)
        constants = [self._constants.get(o) for o in operands]
        shapes = [by_id[i].shape for i in instruction.operand_ids]
        node = Node(instruction, shapes, constants, computations, self.settings)
        if opcode in COLLECTIVES:
            function = COLLECTIVES[opcode](node, self.ranks)
        elif opcode in LOCAL:
            function = LOCAL[opcode](node)
        elif opcode in IN_PLACE:
            function = IN_PLACE[opcode](node)
            if slot not in memory.overwrites:
                function = _on_a_copy(function)
        else:
            raise node.unsupported()
        if opcode not in NEVER_CONSTANT and all(c is not None for c in constants):
            self._constants[slot] = function(*constants)
        else:
            self._steps.append(_Step(function, operands, slot, opcode in COLLECTIVES, memory.freed[slot]))

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Run on ``inputs[parameter][rank]`` and return the outputs, ``[output][rank]``.

        A parameter that is aliased to an output may be overwritten. An output shares memory with that parameter or
        with none.

        Raises:
            InvalidGraphError: an input is missing, or its shape or dtype is not that of its parameter.
        """
        if len(inputs) != len(self._shapes):
            raise InvalidGraphError(f"the graph has {len(self._shapes)} parameters, not {len(inputs)}")
        by_rank: list[list[Any]] = []
        for rank in range(self.ranks):
            values: list[Any] = [None] * len(self._slots)
            for slot, constant in self._constants.items():
                values[slot] = constant
            for number, slot in self._inputs.items():
                values[slot] = self._input(number, inputs[number][rank])
            by_rank.append(values)
        for function, operands, result, collective, freed in self._steps:
            if collective:
                results = function(*[[values[o] for values in by_rank] for o in operands])
                for values, value in zip(by_rank, results, strict=True):
                    values[result] = value
            else:
                for values in by_rank:
                    values[result] = function(*[values[o] for o in operands])
            for values in by_rank:
                for slot in freed:
                    values[slot] = None
        return [
            [values[slot].clone() if copied else values[slot] for values in by_rank]
            for slot, copied in zip(self._outputs, self._copied_outputs, strict=True)
        ]

    def _input(self, number: int, value: Tensor) -> Tensor:
        """Check one parameter's value and convert it to its storage dtype."""
        shape = self._shapes[number]
        stored = to_storage(value, shape.element_type)
        if stored is None or value.shape != tuple(shape.dimensions):
            actual = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            raise InvalidGraphError(f"parameter {number} is {Type.of(shape)} in the graph, but the input is {actual}")
        return stored


def live_instructions(module: Any) -> list[Any]:
    """Return the entry computation's instructions that an output depends on, in order, without a root tuple."""
    entry = _entry(module)
    operands = {i.id: i.operand_ids for i in entry.instructions}
    live: set[int] = set()
    waiting = _output_ids(entry)
    while waiting:
        if (number := waiting.pop()) not in live:
            live.add(number)
            waiting.extend(operands[number])
    return [i for i in entry.instructions if i.id in live]


def _entry(module: Any) -> Any:
    return next(c for c in module.computations if c.id == module.entry_computation_id)


def _output_ids(entry: Any) -> list[int]:
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    return list(root.operand_ids) if root.opcode == "tuple" else [root.id]


def _on_a_copy(function: Function) -> Function:
    return lambda x, *operands: function(x.clone(memory_format=torch.contiguous_format), *operands)
