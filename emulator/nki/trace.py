"""The trace of a kernel run: every instruction in program order, every buffer with its live range.

The timing model reads only this of a kernel. A trace contains no data: runs on arrays and on shapes alone give the
same trace. Instructions appear in the order the kernel issued them; the hardware may run them in any order that keeps
each engine in order and respects the dependencies between their regions.

A *folded* trace (an option of shape-only runs) records one of many equal iterations of an outermost loop: the
instructions of a :class:`Fold` stand for ``times`` iterations. Totals multiply by :meth:`Trace.weights`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Engine(str, Enum):
    """The in-order engines of a NeuronCore; its DMA engines count as one."""

    TENSOR = "tensor"
    VECTOR = "vector"
    SCALAR = "scalar"
    GPSIMD = "gpsimd"
    DMA = "dma"


class Space(str, Enum):
    """The memory that a buffer is in."""

    HBM = "hbm"
    SBUF = "sbuf"
    PSUM = "psum"


class Region(NamedTuple):
    """The bounding rectangle, in one buffer, of what an instruction accesses.

    SBUF and PSUM: partitions ``[first, last)`` and, in each of them, bytes ``[low, high)``. HBM: the leading index of
    the tensor takes the place of the partition; the bytes are those of the remaining dimensions.
    """

    buffer: int
    first: int
    last: int
    low: int
    high: int

    def overlaps(self, other: Region) -> bool:
        """Return whether the two rectangles share a byte."""
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

    ``dtype`` is that of the operands (tensor engine), of the result (elementwise) or of the destination (DMA).
    ``location`` is the kernel's ``file:line``. ``loop`` has the iteration numbers of the enclosing loops, outermost
    first; a plain ``range`` that Python unrolls is not among them.

    Fields by kind of instruction:

    * matmul: ``k``, ``m``, ``n`` (stationary [k, m], moving [k, n], result [m, n]) and ``accumulate``. A transpose on
      the tensor engine has op ``transpose`` and the same fields.
    * elementwise: ``partitions``, ``elements`` per partition of the largest operand, and ``full``, the places in
      ``reads`` of the operands with as many elements. A reduction beside a result is an instruction of its own, whose
      op begins with ``accumulate_``.
    * DMA: ``bytes`` in total, ``row_bytes`` that are contiguous on both sides (one descriptor), ``partitions`` on the
      SBUF side, ``source`` and ``target``.
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
    full: tuple[int, ...] = ()
    bytes: int = 0
    row_bytes: int = 0
    source: Space | None = None
    target: Space | None = None


@dataclass(slots=True)
class Buffer:
    """One allocation, live in program order over the instructions ``[allocated, released)``.

    ``released`` is one after the last access; a buffer that no instruction accesses is never live. An HBM tensor has
    one partition per leading index. ``kernel_argument`` marks HBM tensors that exist before the kernel.
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
    """The instructions ``[start, stop)`` stand for ``times`` equal iterations of one outermost loop."""

    start: int
    stop: int
    times: int


@dataclass(slots=True)
class Trace:
    """The instructions and buffers of one run of the kernel ``name``; ``buffers[i].id == i``.

    ``spilled``: a compiler moved tiles to HBM, and its staging tiles may take the SBUF that it keeps for itself.
    """

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)
    spilled: bool = False

    def weights(self) -> list[int]:
        """Return, for each recorded instruction, the number of executed instructions it stands for."""
        result = [1] * len(self.instructions)
        for fold in self.folds:
            result[fold.start : fold.stop] = [fold.times] * (fold.stop - fold.start)
        return result

    def traffic(self) -> tuple[int, int]:
        """Return the HBM bytes read and written."""
        read = written = 0
        for instruction, weight in zip(self.instructions, self.weights(), strict=True):
            read += weight * instruction.bytes * (instruction.source is Space.HBM)
            written += weight * instruction.bytes * (instruction.target is Space.HBM)
        return read, written

    def multiply_adds(self) -> int:
        """Return the multiply-adds of all matmuls; transposes do not count."""
        steps = zip(self.instructions, self.weights(), strict=True)
        return sum(weight * i.k * i.m * i.n for i, weight in steps if i.op == "matmul")

    def peak(self, space: Space) -> int:
        """Return the peak of live bytes per partition of ``space``, in program order."""
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
