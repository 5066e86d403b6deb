"""What a kernel did: every instruction in program order, every buffer with its live range.

This is all the timing model sees of a kernel. A trace holds no data: it is the same whether the kernel ran on
arrays or on shapes alone. Instructions appear in the order the kernel issued them; the hardware may run them in
any order that keeps each engine in order and honours the dependencies the regions show.

A *folded* trace (shape-only runs may ask for it) records one of a run of like iterations of an outermost loop: the
instructions of a :class:`Fold` stand for ``times`` iterations. Totals multiply by :meth:`Trace.weights`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Engine(str, Enum):
    """The in-order engines of a NeuronCore, and its DMA engines as one."""

    TENSOR = "tensor"
    VECTOR = "vector"
    SCALAR = "scalar"
    GPSIMD = "gpsimd"
    DMA = "dma"


class Space(str, Enum):
    """Where a buffer lies."""

    HBM = "hbm"
    SBUF = "sbuf"
    PSUM = "psum"


class Region(NamedTuple):
    """A rectangle of one buffer, the hull of what an instruction touches.

    SBUF and PSUM: partitions ``[first, last)`` and, in each, bytes ``[low, high)``. HBM: the leading index of the
    tensor takes the place of the partition, and the bytes are those of the remaining dimensions.
    """

    buffer: int
    first: int
    last: int
    low: int
    high: int

    def overlaps(self, other: Region) -> bool:
        """Whether the two rectangles share an element."""
        return (
            self.buffer == other.buffer
            and self.first < other.last
            and other.first < self.last
            and self.low < other.high
            and other.low < self.high
        )


@dataclass(slots=True)
class Instruction:
    """One executed instruction.

    ``dtype`` is that of the tensor engine's operands, of an elementwise result, of the elements a DMA moves. A
    matrix product has ``k``, ``m``, ``n`` (stationary [k, m], moving [k, n], result [m, n]) and ``accumulate``; a
    transposition on the tensor engine has op ``transpose`` and the same fields. An elementwise instruction has
    ``partitions`` and ``elements`` (a partition, of its largest operand). A DMA has ``bytes`` in all, ``row_bytes``
    contiguous on both sides in one descriptor, ``partitions`` on the SBUF side, and its ``source`` and ``target``.

    ``location`` is the kernel's ``file:line``; ``loop`` holds the iteration numbers of the loops around, outermost
    first (only loops the emulator can see: not a plain ``range``).
    """

    engine: Engine
    op: str
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    location: str
    loop: tuple[int, ...] = ()
    dtype: str = "float32"
    k: int = 0
    m: int = 0
    n: int = 0
    accumulate: bool = False
    partitions: int = 0
    elements: int = 0
    bytes: int = 0
    row_bytes: int = 0
    source: Space | None = None
    target: Space | None = None


@dataclass(slots=True)
class Buffer:
    """One allocation. ``allocated`` and ``released`` are indices into the trace's instructions.

    It is live in program order over ``[allocated, released)``: released follows the last access, and a buffer that no
    instruction touches is never live. HBM tensors have one partition for each leading index. ``kernel_argument`` marks
    HBM tensors that exist before the kernel.
    """

    id: int
    name: str
    space: Space
    shape: tuple[int, ...]
    dtype: str
    partitions: int
    bytes_per_partition: int
    allocated: int
    released: int
    location: str
    loop: tuple[int, ...] = ()
    kernel_argument: bool = False


class Fold(NamedTuple):
    """Instructions ``[start, stop)`` stand for ``times`` like iterations of one outermost loop."""

    start: int
    stop: int
    times: int


@dataclass(slots=True)
class Trace:
    """The instructions and buffers of one run of the kernel ``name``; ``buffers[i].id == i``."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)

    def weights(self) -> list[int]:
        """How many executed instructions each recorded one stands for."""
        result = [1] * len(self.instructions)
        for fold in self.folds:
            result[fold.start : fold.stop] = [fold.times] * (fold.stop - fold.start)
        return result

    def traffic(self) -> tuple[int, int]:
        """HBM bytes read and written."""
        read = written = 0
        for instruction, weight in zip(self.instructions, self.weights(), strict=True):
            read += weight * instruction.bytes * (instruction.source is Space.HBM)
            written += weight * instruction.bytes * (instruction.target is Space.HBM)
        return read, written

    def multiply_adds(self) -> int:
        """Multiply-adds of the matrix products (transpositions not counted)."""
        steps = zip(self.instructions, self.weights(), strict=True)
        return sum(weight * i.k * i.m * i.n for i, weight in steps if i.op == "matmul")

    def peak(self, space: Space) -> int:
        """Most bytes a partition of ``space`` that are live at one time, in program order."""
        change: dict[int, int] = {}
        for buffer in self.buffers:
            if buffer.space is space:
                change[buffer.allocated] = change.get(buffer.allocated, 0) + buffer.bytes_per_partition
                change[buffer.released] = change.get(buffer.released, 0) - buffer.bytes_per_partition
        level = peak = 0
        for index in sorted(change):
            level += change[index]
            peak = max(peak, level)
        return peak
