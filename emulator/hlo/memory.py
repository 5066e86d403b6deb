"""Which values of a graph share memory, which updates may overwrite their operand, and when a value is last read.

The memory of a value is named by the slot of the value that made it; views and updates in place carry the name on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from neuronmm.emulator.hlo.node import ACROSS, IN_PLACE, VIEWS

NEVER_CONSTANT = {"rng", "custom-call", "parameter", *ACROSS}


class Memory(NamedTuple):
    """``overwrites``: slots of updates that may write into their first operand. ``dropped``: slot -> slots that nobody
    reads after it. ``foreign``: whether an output lies in the memory of a parameter that is not its own."""

    overwrites: set[int]
    dropped: dict[int, tuple[int, ...]]
    foreign: list[bool]


def plan_memory(
    instructions: list[Any],
    slots: dict[int, int],
    inputs: dict[int, int],
    outputs: list[int],
    aliases: dict[int, int],
) -> Memory:
    """``slots``: instruction id -> slot. ``inputs``: parameter number -> slot. ``aliases``: output number -> parameter
    number whose memory it shares."""
    last = _last_reads(instructions, slots, outputs)
    parameters = set(inputs.values())
    given = {inputs[number] for number in aliases.values()}
    buffer: dict[int, int] = {}
    shared: set[int] = set()  # memory that several values of the graph, or several ranks, see
    constant: set[int] = set()
    overwrites: set[int] = set()
    for place, instruction in enumerate(instructions):
        slot, operands = slots[instruction.id], [slots[o] for o in instruction.operand_ids]
        buffer[slot] = slot
        if instruction.opcode not in NEVER_CONSTANT and all(o in constant for o in operands):
            constant.add(slot)
            shared.add(slot)
        elif instruction.opcode in ACROSS:
            shared.add(slot)
        elif instruction.opcode in VIEWS and operands:
            buffer[slot] = buffer[operands[0]]
        elif instruction.opcode in IN_PLACE:
            target = buffer[operands[0]]
            read_later = any(last.get(s, -1) > place for s, b in buffer.items() if b == target)
            also_read = any(buffer[o] == target for o in operands[1:])
            mine = target not in shared and (target not in parameters or target in given)
            if mine and not read_later and not also_read:
                buffer[slot] = target
                overwrites.add(slot)
    dropped = {
        slots[instruction.id]: tuple(
            o for o in {slots[o] for o in instruction.operand_ids} if last[o] == place and o not in constant
        )
        for place, instruction in enumerate(instructions)
    }
    foreign = [buffer[s] in parameters and buffer[s] != inputs.get(aliases.get(n, -1)) for n, s in enumerate(outputs)]
    return Memory(overwrites, dropped, foreign)


def _last_reads(instructions: list[Any], slots: dict[int, int], outputs: list[int]) -> dict[int, int]:
    """Slot -> place of the last instruction that reads it; outputs, and what a tuple holds, are read at the end."""
    last: dict[int, int] = {}
    for place, instruction in enumerate(instructions):
        end = len(instructions) if instruction.opcode == "tuple" else place
        for operand in instruction.operand_ids:
            last[slots[operand]] = max(end, last.get(slots[operand], -1))
    last.update(dict.fromkeys(outputs, len(instructions)))
    return last
