"""The running kernel: its memory, its trace, the loops it is in, and the rules that hold over a whole run."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import numpy as np

from neuronmm.emulator.nki.dtypes import dtype_name, unwritten
from neuronmm.emulator.nki.errors import NkiError
from neuronmm.emulator.nki.trace import Buffer, Engine, Fold, Instruction, Region, Space, Trace
from neuronmm.kernels.hardware import NeuronCore

_OWN = str(Path(__file__).parent)
_plumbing: dict[str, bool] = {}
_lines: dict[tuple[str, int], str] = {}


@dataclass(slots=True, eq=False)
class Storage:
    """One allocation's memory. ``data`` is a flat array, or None in a shape-only run.

    ``free`` is the number of elements a partition (a leading index in HBM). ``stamps``, where a race could be, holds
    for each element the number of the instruction that wrote it last (-1: none). ``groups`` maps what was written to
    PSUM to the engine. ``scope`` is the loop body it was allocated in. ``filled`` before the kernel; ``immutable``: the
    kernel may not write it.
    """

    record: Buffer
    dtype: np.dtype
    free: int
    data: np.ndarray | None
    born: int
    zeroed: bool = False
    stamps: np.ndarray | None = None
    groups: dict[tuple[int, int, int, int], Engine] | None = None
    scope: Scope | None = None
    filled: bool = False
    immutable: bool = False


@dataclass(slots=True)
class Scope:
    """The body of a loop in one iteration; what is allocated there may only be used there."""

    loop: str
    open: bool = True


@dataclass(slots=True)
class Loop:
    """A loop the kernel is in; ``started`` and ``iteration`` are instruction numbers.

    ``scope`` is None where the loop is unrolled. ``reads``, of a ``parallel`` loop: what of each storage was read, as
    (instruction, view, mask).
    """

    parallel: bool
    started: int
    iteration: int
    index: int
    location: str
    scope: Scope | None = None
    reads: dict[Storage, list[tuple[int, Any, Any]]] = field(default_factory=dict)


class Machine:
    """State of one kernel run.

    ``data`` False runs on shapes alone. ``shuffle`` runs the iterations of ``affine_range`` in a random order with
    this seed. ``fold`` (shape-only) records the second iteration of an outermost loop for all but the first and last.
    ``program`` and ``grid`` place the running program in the launch grid; ``shared`` are the tensors in shared HBM, and
    ``declared`` counts those this program has named. ``body`` is the code of a kernel that
    must declare shared HBM itself.
    """

    def __init__(
        self, name: str, core: NeuronCore, *, data: bool = True, shuffle: int | None = None, fold: bool = False
    ) -> None:
        if data and fold:
            raise ValueError("folding skips iterations, so it needs a shape-only run")
        self.core, self.data, self.fold = core, data, fold
        self.trace = Trace(name)
        self.loops: list[Loop] = []
        self.program: tuple[int, ...] = (0,)
        self.grid: tuple[int, ...] = (1,)
        self.shared: list[Any] = []
        self.declared = 0
        self.body: CodeType | None = None
        self._random = None if shuffle is None else random.Random(shuffle)

    def fail(self, rule: str, message: str, limit: object = None, actual: object = None) -> NoReturn:
        """Raise the violation of a rule at the kernel's current line."""
        raise NkiError(self.location(), rule, message, limit, actual)

    def location(self) -> str:
        """``file:line`` of the kernel."""
        frame = _kernel_frame()
        key = (frame.f_code.co_filename, frame.f_lineno)
        if key not in _lines:
            _lines[key] = f"{key[0]}:{key[1]}"
        return _lines[key]

    def at_top_level(self) -> bool:
        """Whether the code at work is outside of loops and, where ``body`` is known, the kernel's own."""
        return not self.loops and self.body in (None, _kernel_frame().f_code)

    def allocate(
        self,
        shape: tuple[int, ...],
        partition_axis: int,
        dtype: np.dtype,
        space: Space,
        name: str = "",
        content: np.ndarray | None = None,
    ) -> Storage:
        """Reserve memory for ``shape``; ``content`` fills an HBM tensor that exists before the kernel."""
        partitions = shape[partition_axis] if shape else 1
        size = prod(shape)
        free = size // partitions if partitions else 0
        if size <= 0:
            self.fail("shape", f"a tensor of shape {shape} has no elements", "> 0 elements", size)
        if space is not Space.HBM and partitions > self.core.partitions:
            self.fail(
                "partitions", f"a tile of shape {shape} has too many partitions", self.core.partitions, partitions
            )
        per_partition = free * dtype.itemsize
        limit = {Space.SBUF: self.core.sbuf_partition_bytes, Space.PSUM: self.core.psum_partition_bytes}.get(space)
        if limit is not None and per_partition > limit:
            self.fail(
                "free size", f"a tile of shape {shape} exceeds a partition of {space.value}", limit, per_partition
            )
        at, here = len(self.trace.instructions), self.location()
        record = Buffer(
            len(self.trace.buffers), name, space, shape, dtype_name(dtype), partitions, per_partition, at, at, here,
            tuple([loop.index for loop in self.loops]), content is not None,
        )  # fmt: skip
        self.trace.buffers.append(record)
        data = None
        if self.data:
            data = unwritten(size, dtype) if content is None else np.ascontiguousarray(content).reshape(-1).copy()
        scope = next((loop.scope for loop in reversed(self.loops) if loop.scope), None)
        return Storage(record, dtype, free, data, at, groups={} if space is Space.PSUM else None, scope=scope)

    def check_scope(self, storage: Storage) -> None:
        """Raise if the storage was allocated in a loop body that has ended."""
        if storage.scope is not None and not storage.scope.open:
            self.fail(
                "scope",
                f"the buffer allocated at {storage.record.location} belongs to the body of the loop at "
                f"{storage.scope.loop} and is used outside of it: declare it before the loop",
            )

    def emit(
        self, engine: Engine, op: str, reads: tuple[Region, ...], writes: tuple[Region, ...], **fields: Any
    ) -> None:
        """Append an instruction and extend the live ranges of the buffers it touches."""
        trace = self.trace
        loop = tuple([loop.index for loop in self.loops]) if self.loops else ()
        trace.instructions.append(Instruction(engine, op, reads, writes, self.location(), loop, **fields))
        end = len(trace.instructions)
        for region in reads:
            trace.buffers[region.buffer].released = end
        for region in writes:
            trace.buffers[region.buffer].released = end

    def iterate(self, indices: range, *, parallel: bool = False, scoped: bool = False) -> Iterator[int]:
        """Run a loop of the kernel: the race rules of ``affine_range`` hold where ``parallel``.

        Where ``scoped``, what the body allocates may not be used after it.
        """
        now = len(self.trace.instructions)
        loop = Loop(parallel, now, now, 0, self.location())
        order = list(indices)
        if parallel and self._random is not None:
            self._random.shuffle(order)
        folded = self.fold and not self.loops and len(order) > 3
        self.loops.append(loop)
        for position, index in enumerate(order):
            if folded and 1 < position < len(order) - 1:
                continue
            loop.index, loop.iteration = index, len(self.trace.instructions)
            loop.scope = scope = Scope(loop.location) if scoped else None
            yield index
            if scope is not None:
                scope.open = False
            if folded and position == 1:
                self.trace.folds.append(Fold(loop.iteration, len(self.trace.instructions), len(order) - 2))
        self.loops.pop()

    def finish(self, capacity: bool) -> Trace:
        """Check the capacities over all live ranges (unless not ``capacity``) and return the trace.

        A PSUM tile is counted in whole banks: matrix products write one bank, and two tiles never share one here.
        """
        banks, bank = self.core.psum_banks, self.core.psum_bank_bytes
        if capacity:
            self._check_capacity(Space.SBUF, self.core.sbuf_partition_bytes, 1, "bytes a partition")
            self._check_capacity(Space.PSUM, banks, bank, "banks")
        return self.trace

    def _check_capacity(self, space: Space, limit: int, unit: int, what: str) -> None:
        events = []
        for buffer in self.trace.buffers:
            if buffer.space is space and buffer.released > buffer.allocated:
                size = -(-buffer.bytes_per_partition // unit)
                events += [(buffer.allocated, 1, size, buffer), (buffer.released, 0, -size, buffer)]
        events.sort(key=lambda event: event[:2])
        level = 0
        for _, _, size, buffer in events:
            level += size
            if level > limit:
                raise NkiError(
                    buffer.location,
                    f"{space.value} capacity",
                    f"allocating {buffer.shape} {buffer.dtype} here exceeds {space.value} ({what}, all live tiles)",
                    limit,
                    level,
                )


def _kernel_frame() -> FrameType:
    """The innermost frame that is neither the emulator's nor a dialect binding's."""
    frame = sys._getframe(2)
    while True:
        file = frame.f_code.co_filename  # a code object is no key: those of two copies of a file are equal
        inside = _plumbing.get(file)
        if inside is None:
            inside = file.startswith(_OWN) or "NKI_BINDING" in frame.f_globals
            _plumbing[file] = inside
        if not inside or frame.f_back is None:
            return frame
        frame = frame.f_back


_stack: list[Machine] = []


def current() -> Machine:
    """The machine of the running kernel.

    Raises:
        RuntimeError: no kernel is running; NKI calls only mean something inside one.
    """
    if not _stack:
        raise RuntimeError("NKI calls are only possible inside a kernel: use simulate() or trace()")
    return _stack[-1]


def running() -> bool:
    """Whether a kernel is running."""
    return bool(_stack)


def push(machine: Machine) -> None:
    """Begin a run: ``machine`` is the current one until :func:`pop`."""
    _stack.append(machine)


def pop() -> None:
    """End the run begun last."""
    _stack.pop()
