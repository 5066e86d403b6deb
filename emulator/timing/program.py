"""A trace made ready to run: the cost of every instruction and the instructions it waits for.

A folded trace is unrolled for a few iterations only; :mod:`.simulate` extrapolates the rest from the period of one
of them, which is exact once the pipeline is in its steady state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from neuronmm.emulator.nki.trace import Buffer, Engine, Space, Trace
from neuronmm.emulator.timing.cost import Cost, cost
from neuronmm.emulator.timing.dependencies import Memory, Ports, Tiles
from neuronmm.kernels.hardware import NeuronCore


class Segment(NamedTuple):
    """Steps ``[start, stop)`` of the program: one simulated iteration of fold number ``fold`` (-1: no fold)."""

    start: int
    stop: int
    fold: int


@dataclass
class Program:
    """Steps in program order. ``source[i]`` is the index in the trace's instructions that step ``i`` executes."""

    trace: Trace
    core: NeuronCore
    source: list[int] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)


def prepare(trace: Trace, core: NeuronCore, generations: int, samples: int) -> Program:
    """Cost and dependencies of every instruction of ``trace`` on ``core``, ``samples`` iterations a fold.

    Raises:
        CapacityError: the live buffers do not fit SBUF or PSUM.
    """
    program = Program(trace, core)
    costs = [cost(instruction, trace.buffers, core) for instruction in trace.instructions]
    memories = {
        Space.SBUF: Memory(Space.SBUF, core.sbuf_partition_bytes, 1, generations),
        Space.PSUM: Memory(Space.PSUM, core.psum_partition_bytes, core.psum_bank_bytes, generations),
    }
    allocations, releases = _schedule_of_buffers(trace)
    for space, memory in memories.items():
        memory.learn(_steps(trace, allocations, releases, space))
    tiles, ports = Tiles(), Ports(core.exclusive)
    silent = _one_way_buffers(trace)
    keys = list(range(len(trace.buffers)))  # the key of each buffer's present incarnation
    alive = [False] * len(trace.buffers)
    next_key = len(keys)
    places: dict[int, set[int]] = {}  # by key: what the first write must wait for, for the place's sake
    dropped: dict[int, set[int]] = {}  # by key: the last uses of a released buffer

    def release(b: int) -> None:
        alive[b] = False
        dropped[keys[b]] = tiles.last_uses(keys[b])
        memories[trace.buffers[b].space].release(keys[b])

    for start, stop, fold in _segments(trace, samples):
        first_step = len(program.source)
        for i in range(start, stop):
            for b in releases.get(i, ()):
                if alive[b]:
                    release(b)
            for b in allocations.get(i, ()):
                if alive[b]:  # allocated before a fold at its very start: not again on every iteration
                    continue
                keys[b], next_key, alive[b] = next_key, next_key + 1, True
                waits: set[int] = set()
                for key in memories[trace.buffers[b].space].allocate(keys[b], trace.buffers[b]):
                    waits |= dropped.pop(key)
                places[keys[b]] = waits
            instruction = trace.instructions[i]
            step = len(program.source)
            reads = [(keys[r.buffer], r) for r in instruction.reads if r.buffer not in silent]
            writes = [(keys[r.buffer], r) for r in instruction.writes if r.buffer not in silent]
            before, fresh = tiles.add(step, instruction.engine, reads, writes)
            for key in fresh:
                before |= places.get(key, set())
            touched = {trace.buffers[r.buffer].space for r in instruction.reads + instruction.writes}
            before |= ports.add(step, instruction.engine, touched)
            program.source.append(i)
            program.costs.append(costs[i])
            program.before.append(_latest(before, instruction.engine, program))
        for b in releases.get(stop, ()) if fold >= 0 else ():
            if alive[b] and _inside(trace.buffers[b], start, stop):
                release(b)
        program.segments.append(Segment(first_step, len(program.source), fold))
    return program


def _segments(trace: Trace, samples: int) -> Iterator[tuple[int, int, int]]:
    """Stretches of the trace to execute in turn: (start, stop, number of the fold or -1)."""
    at = 0
    for number, fold in enumerate(trace.folds):
        if at < fold.start:
            yield at, fold.start, -1
        for _ in range(min(fold.times, samples)):
            yield fold.start, fold.stop, number
        at = fold.stop
    if at < len(trace.instructions):
        yield at, len(trace.instructions), -1


def _inside(buffer: Buffer, start: int, stop: int) -> bool:
    """Whether a fold's iterations allocate ``buffer`` (one allocated just before the loop has no loop around it)."""
    return start <= buffer.allocated < stop and buffer.loop != ()


def _schedule_of_buffers(trace: Trace) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """On-chip buffers to allocate and to release before each instruction.

    A buffer from outside a fold whose last use is inside it is released after the fold's last iteration.
    """
    allocations: dict[int, list[int]] = {}
    releases: dict[int, list[int]] = {}
    for buffer in trace.buffers:
        if buffer.space is Space.HBM or buffer.allocated >= buffer.released:
            continue
        released = buffer.released
        for fold in trace.folds:
            if fold.start < released < fold.stop and not _inside(buffer, fold.start, fold.stop):
                released = fold.stop
        allocations.setdefault(buffer.allocated, []).append(buffer.id)
        releases.setdefault(released, []).append(buffer.id)
    return allocations, releases


def _steps(
    trace: Trace, allocations: dict[int, list[int]], releases: dict[int, list[int]], space: Space
) -> Iterator[tuple[bool, Buffer]]:
    for i in range(len(trace.instructions) + 1):
        for allocation, table in ((False, releases), (True, allocations)):
            for b in table.get(i, ()):
                if trace.buffers[b].space is space:
                    yield allocation, trace.buffers[b]


def _one_way_buffers(trace: Trace) -> set[int]:
    """HBM tensors that are only read or only written: no instruction waits for another through them."""
    read = {r.buffer for i in trace.instructions for r in i.reads}
    written = {r.buffer for i in trace.instructions for r in i.writes}
    return {b.id for b in trace.buffers if b.space is Space.HBM and (b.id not in read or b.id not in written)}


def _latest(before: set[int], engine: Engine, program: Program) -> tuple[int, ...]:
    """``before`` without what in-order engines imply: one step an engine, none of the own engine; every DMA."""
    latest: dict[Engine, int] = {}
    kept: list[int] = []
    instructions, source = program.trace.instructions, program.source
    for step in before:
        other = instructions[source[step]].engine
        if other is Engine.DMA:
            kept.append(step)
        elif other is not engine and step > latest.get(other, -1):
            latest[other] = step
    return (*kept, *latest.values())
