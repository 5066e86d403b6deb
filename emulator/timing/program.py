"""Prepare a trace for simulation: the cost of every instruction, and the instructions that it waits for.

A fold is unrolled for a few iterations only; :mod:`.simulate` extrapolates the others from the period of one iteration,
which is exact once the pipeline is in its steady state.
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
    """Steps ``[start, stop)`` of the program: one iteration of fold number ``fold``, or no part of a fold (-1)."""

    start: int
    stop: int
    fold: int


@dataclass
class Program:
    """The steps of a simulation, in program order.

    Step ``i`` executes the trace's instruction ``source[i]``, costs ``costs[i]`` and waits for the steps ``before[i]``.
    """

    trace: Trace
    core: NeuronCore
    source: list[int] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)


def prepare(trace: Trace, core: NeuronCore, generations: int, samples: int) -> Program:
    """Prepare ``trace`` for ``core``, with at most ``samples`` iterations per fold.

    ``generations`` is the number of places that an allocation site may have (2: double buffering).

    Raises:
        CapacityError: the live buffers do not fit SBUF or PSUM.
    """
    program = Program(trace, core)
    costs = [cost(instruction, trace.buffers, core) for instruction in trace.instructions]
    sbuf = core.sbuf_partition_bytes if trace.spilled else core.sbuf_usable_bytes
    memories = {
        Space.SBUF: Memory(Space.SBUF, sbuf, 1, generations),
        Space.PSUM: Memory(Space.PSUM, core.psum_partition_bytes, core.psum_bank_bytes, generations),
    }
    allocations, releases = _schedule_of_buffers(trace)
    for space, memory in memories.items():
        memory.learn(_buffer_events(trace, allocations, releases, space))
    tiles, ports = Tiles(), Ports(core.exclusive)
    one_way = _one_way_buffers(trace)
    keys = list(range(len(trace.buffers)))  # the key of each buffer's latest allocation
    alive = [False] * len(trace.buffers)
    next_key = len(keys)
    place_uses: dict[int, set[int]] = {}  # key -> the last uses of the place before; the first write waits for them
    last_uses: dict[int, set[int]] = {}  # key of a released buffer -> its last uses

    def release(b: int) -> None:
        alive[b] = False
        last_uses[keys[b]] = tiles.last_uses(keys[b])
        memories[trace.buffers[b].space].release(keys[b])

    for start, stop, fold in _segments(trace, samples):
        first_step = len(program.source)
        for i in range(start, stop):
            for b in releases.get(i, ()):
                if alive[b]:
                    release(b)
            for b in allocations.get(i, ()):
                if alive[b]:  # allocated right before a fold: not again in every iteration
                    continue
                keys[b], next_key, alive[b] = next_key, next_key + 1, True
                waits: set[int] = set()
                for key in memories[trace.buffers[b].space].allocate(keys[b], trace.buffers[b]):
                    waits |= last_uses.pop(key)
                place_uses[keys[b]] = waits
            instruction = trace.instructions[i]
            step = len(program.source)
            reads = [(keys[r.buffer], r) for r in instruction.reads if r.buffer not in one_way]
            writes = [(keys[r.buffer], r) for r in instruction.writes if r.buffer not in one_way]
            before, fresh = tiles.add(step, instruction.engine, reads, writes)
            for key in fresh:
                before |= place_uses.get(key, set())
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
    """Yield the stretches of the trace to execute, in order: (start, stop, number of the fold or -1)."""
    position = 0
    for number, fold in enumerate(trace.folds):
        if position < fold.start:
            yield position, fold.start, -1
        for _ in range(min(fold.times, samples)):
            yield fold.start, fold.stop, number
        position = fold.stop
    if position < len(trace.instructions):
        yield position, len(trace.instructions), -1


def _inside(buffer: Buffer, start: int, stop: int) -> bool:
    """Return whether the fold's iterations allocate ``buffer``; one allocated right before the loop has no ``loop``."""
    return start <= buffer.allocated < stop and buffer.loop != ()


def _schedule_of_buffers(trace: Trace) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return the on-chip buffers to allocate, and those to release, before each instruction.

    A buffer that is allocated outside a fold and last used inside it is released after the fold's last iteration.
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


def _buffer_events(
    trace: Trace, allocations: dict[int, list[int]], releases: dict[int, list[int]], space: Space
) -> Iterator[tuple[bool, Buffer]]:
    """Yield (is allocation, buffer) of one memory, in program order."""
    for i in range(len(trace.instructions) + 1):
        for allocation, table in ((False, releases), (True, allocations)):
            for b in table.get(i, ()):
                if trace.buffers[b].space is space:
                    yield allocation, trace.buffers[b]


def _one_way_buffers(trace: Trace) -> set[int]:
    """Return the HBM tensors that are only read or only written: no instruction waits for another through them."""
    read = {r.buffer for i in trace.instructions for r in i.reads}
    written = {r.buffer for i in trace.instructions for r in i.writes}
    return {b.id for b in trace.buffers if b.space is Space.HBM and (b.id not in read or b.id not in written)}


def _latest(before: set[int], engine: Engine, program: Program) -> tuple[int, ...]:
    """Drop what in-order execution implies: keep every DMA, and the latest step of every other engine but its own."""
    latest: dict[Engine, int] = {}
    dmas: list[int] = []
    instructions, source = program.trace.instructions, program.source
    for step in before:
        other = instructions[source[step]].engine
        if other is Engine.DMA:
            dmas.append(step)
        elif other is not engine and step > latest.get(other, -1):
            latest[other] = step
    return (*dmas, *latest.values())
