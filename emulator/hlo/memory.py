"""Memory planning: which values share memory, which updates may run in place, and when a value is last read.

A buffer is identified by the slot of the value that created it. Views, updates in place and the elements of a tuple
share their operand's buffer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from neuronmm.emulator.hlo.node import COLLECTIVES, IN_PLACE, VIEWS

NEVER_CONSTANT = {"rng", "custom-call", "parameter", *COLLECTIVES}
"""Opcodes that are not folded, even if all their operands are constants."""


class MemoryPlan(NamedTuple):
    """The plan of one graph.

    Attributes:
        overwrites: slots of updates that may overwrite their first operand.
        freed: slot -> slots that are not read after that instruction.
        copied_outputs: for each output, whether it shares a parameter's buffer without being aliased to it.
    """

    overwrites: set[int]
    freed: dict[int, tuple[int, ...]]
    copied_outputs: list[bool]


def plan_memory(
    instructions: list[Any],
    slots: dict[int, int],
    inputs: dict[int, int],
    outputs: list[int],
    aliases: dict[int, int],
) -> MemoryPlan:
    """Plan the memory of a graph.

    Args:
        instructions: HloInstructionProtos in program order.
        slots: instruction id -> slot.
        inputs: parameter number -> slot.
        outputs: the outputs' slots.
        aliases: output number -> number of the parameter whose memory it shares.
    """
    last = _last_reads(instructions, slots, outputs)
    parameters = set(inputs.values())
    writable_parameters = {inputs[number] for number in aliases.values()}
    buffer: dict[int, int] = {}
    shared: set[int] = set()  # buffers that several values of the graph, or several ranks, see
    constant: set[int] = set()
    overwrites: set[int] = set()
    tuples: dict[int, list[int]] = {}  # buffer of a tuple -> its elements
    for position, instruction in enumerate(instructions):
        slot, operands = slots[instruction.id], [slots[o] for o in instruction.operand_ids]
        buffer[slot] = slot
        if instruction.opcode not in NEVER_CONSTANT and all(o in constant for o in operands):
            constant.add(slot)
            shared.add(slot)
        elif instruction.opcode in COLLECTIVES:
            shared.add(slot)
        elif instruction.opcode == "tuple":
            tuples[slot] = operands
        elif instruction.opcode == "get-tuple-element" and buffer[operands[0]] in tuples:
            buffer[slot] = buffer[tuples[buffer[operands[0]]][instruction.tuple_index]]
        elif instruction.opcode in VIEWS and operands:
            buffer[slot] = buffer[operands[0]]
        elif instruction.opcode in IN_PLACE:
            target = buffer[operands[0]]
            read_later = any(last.get(s, -1) > position for s, b in buffer.items() if b == target)
            also_read = any(buffer[o] == target for o in operands[1:])
            writable = target not in shared and (target not in parameters or target in writable_parameters)
            if writable and not read_later and not also_read:
                buffer[slot] = target
                overwrites.add(slot)
    freed = {
        slots[instruction.id]: tuple(
            o for o in {slots[o] for o in instruction.operand_ids} if last[o] == position and o not in constant
        )
        for position, instruction in enumerate(instructions)
    }
    copied = [buffer[s] in parameters and buffer[s] != inputs.get(aliases.get(n, -1)) for n, s in enumerate(outputs)]
    return MemoryPlan(overwrites, freed, copied)


def _last_reads(instructions: list[Any], slots: dict[int, int], outputs: list[int]) -> dict[int, int]:
    """Return, by slot, the position of the last instruction that reads it.

    Outputs and elements of a tuple are read at the end.
    """
    last: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        read_at = len(instructions) if instruction.opcode == "tuple" else position
        for operand in instruction.operand_ids:
            last[slots[operand]] = max(read_at, last.get(slots[operand], -1))
    last.update(dict.fromkeys(outputs, len(instructions)))
    return last
