"""A module made ready to run: planned once, then run on tensors without looking at the module again.

Planning folds constants, makes every instruction's implementation, says when a value is last used, and lets an update
of a tensor (scatter, dynamic-update-slice) overwrite its operand where nobody can see the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuronmm.emulator.hlo import collectives, custom, elementwise, indexing, reducing, rules, rules_joint, shaping
from neuronmm.emulator.hlo.memory import NEVER_CONSTANT, Memory, plan_memory
from neuronmm.emulator.hlo.node import ACROSS, IN_PLACE, LOCAL, Function, Node, Settings, entered, text
from neuronmm.emulator.hlo.types import InvalidGraphError, check

IMPLEMENTATIONS = (collectives, custom, elementwise, indexing, reducing, shaping)
"""The modules that fill the tables of :mod:`.node`."""
TYPE_RULES = (rules, rules_joint)
"""The modules that fill the table of :mod:`.types`."""


class _Step(NamedTuple):
    """One instruction: slots of the operands and the result, and slots that nobody reads after it."""

    function: Function
    operands: tuple[int, ...]
    result: int
    across: bool
    dropped: tuple[int, ...]


class Program:
    """An HloModuleProto for ``ranks`` ranks.

    Attributes:
        module: the module.
        aliases: output number -> number of the parameter whose memory it shares.

    Raises:
        InvalidGraphError: XLA would refuse the graph: a type breaks an instruction's rule.
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
        self._outputs = [self._slots[i] for i in _roots(entry)]
        self._inputs = {i.parameter_number: self._slots[i.id] for i in entry.instructions if i.opcode == "parameter"}
        self._shapes = list(module.host_program_shape.parameters)
        instructions = live_instructions(module)
        memory = plan_memory(instructions, self._slots, self._inputs, self._outputs, self.aliases)
        self._foreign = memory.foreign
        self._constants: dict[int, Any] = {}
        self._steps: list[_Step] = []
        computations = {c.id: c for c in module.computations}
        for instruction in instructions:
            if instruction.opcode != "parameter":
                self._plan(instruction, by_id, computations, memory)

    def _plan(self, instruction: Any, by_id: dict[int, Any], computations: dict[int, Any], memory: Memory) -> None:
        opcode, slot = instruction.opcode, self._slots[instruction.id]
        operands = tuple(self._slots[i] for i in instruction.operand_ids)
        constants = [self._constants.get(o) for o in operands]
        shapes = [by_id[i].shape for i in instruction.operand_ids]
        node = Node(instruction, shapes, constants, computations, self.settings)
        if opcode in ACROSS:
            function = ACROSS[opcode](node, self.ranks)
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
            self._steps.append(_Step(function, operands, slot, opcode in ACROSS, memory.dropped[slot]))

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Run on ``inputs[parameter][rank]``; the outputs, ``[output][rank]``.

        A parameter that shares memory with an output may be overwritten. An output either lies in its own parameter's
        memory or in none of them.

        Raises:
            InvalidGraphError: an input is missing, or has not the shape and dtype of its parameter.
        """
        if len(inputs) != len(self._shapes):
            raise InvalidGraphError(f"the graph has {len(self._shapes)} parameters, not {len(inputs)}")
        values: list[list[Any]] = []
        for rank in range(self.ranks):
            own: list[Any] = [None] * len(self._slots)
            for slot, constant in self._constants.items():
                own[slot] = constant
            for number, slot in self._inputs.items():
                own[slot] = self._entered(number, inputs[number][rank])
            values.append(own)
        for function, operands, result, across, dropped in self._steps:
            if across:
                outcome = function(*[[own[o] for own in values] for o in operands])
                for own, value in zip(values, outcome, strict=True):
                    own[result] = value
            else:
                for own in values:
                    own[result] = function(*[own[o] for o in operands])
            for own in values:
                for slot in dropped:
                    own[slot] = None
        return [
            [own[slot].clone() if foreign else own[slot] for own in values]
            for slot, foreign in zip(self._outputs, self._foreign, strict=True)
        ]

    def _entered(self, number: int, value: Tensor) -> Tensor:
        shape = self._shapes[number]
        held = entered(value, shape.element_type)
        if held is None or value.shape != tuple(shape.dimensions):
            given = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            raise InvalidGraphError(f"parameter {number} is {text(shape)} in the graph, but was given {given}")
        return held


def live_instructions(module: Any) -> list[Any]:
    """The entry computation's instructions that an output depends on, in order; a root tuple is no instruction."""
    entry = _entry(module)
    operands = {i.id: i.operand_ids for i in entry.instructions}
    live: set[int] = set()
    waiting = _roots(entry)
    while waiting:
        if (number := waiting.pop()) not in live:
            live.add(number)
            waiting.extend(operands[number])
    return [i for i in entry.instructions if i.id in live]


def _entry(module: Any) -> Any:
    return next(c for c in module.computations if c.id == module.entry_computation_id)


def _roots(entry: Any) -> list[int]:
    """Ids of the outputs."""
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    return list(root.operand_ids) if root.opcode == "tuple" else [root.id]


def _on_a_copy(function: Function) -> Function:
    return lambda x, *rest: function(x.clone(memory_format=torch.contiguous_format), *rest)
