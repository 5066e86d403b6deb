"""The state of a running kernel: allocations, trace, enclosing loops, and the rules that hold over a whole run.

A rule that a kernel breaks raises :class:`NkiError` at the kernel's line (:meth:`Machine.fail`).
"""

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
from neuronmm.emulator.nki.trace import Buffer, Engine, Fold, Instruction, Region, Space, Trace
from neuronmm.kernels.hardware import NeuronCore

_PACKAGE = str(Path(__file__).parent)
_internal_files: dict[str, bool] = {}
_locations: dict[tuple[str, int], str] = {}


class NkiError(RuntimeError):
    """A kernel broke a rule of the hardware or of the language.

    Attributes: ``location`` "file:line" of the kernel source; ``rule`` a short stable name; ``limit`` and ``actual``
    the allowed and the actual value (None if the rule has no figure).
    """

    def __init__(self, location: str, rule: str, message: str, limit: object = None, actual: object = None) -> None:
        figures = "" if limit is None and actual is None else f" (limit: {limit}; actual: {actual})"
        super().__init__(f"{location}: {message}{figures} [{rule}]")
        self.location, self.rule, self.limit, self.actual = location, rule, limit, actual


@dataclass(slots=True, eq=False)
class Storage:
    """The memory of one allocation.

    ``data``: flat array, None in a shape-only run. ``free_size``: elements per partition (in HBM, per leading index).
    ``allocated_at``: number of instructions before the allocation. ``zeroed``: declared as zeros in PSUM, without an
    instruction. ``last_writes`` and ``last_sets``: for each element the number of the instruction that wrote it last,
    and of the last one that neither added nor was a matmul (-1: none), kept only where a race is possible. ``writers``:
    written PSUM region -> engine, None outside of PSUM. ``scope``: the loop body of the allocation. ``preset``: has its
    values before the kernel starts. ``read_only``: the kernel must not write it. ``assigned``: it was the result of an
    instruction that now writes another tile.
    """

    record: Buffer
    dtype: np.dtype
    free_size: int
    data: np.ndarray | None
    allocated_at: int
    zeroed: bool = False
    last_writes: np.ndarray | None = None
    last_sets: np.ndarray | None = None
    writers: dict[tuple[int, int, int, int], Engine] | None = None
    scope: Scope | None = None
    preset: bool = False
    read_only: bool = False
    assigned: bool = False


@dataclass(slots=True)
class Scope:
    """One iteration of a loop body. Its allocations must not be used after it, when ``open`` is False."""

    loop: str
    open: bool = True


@dataclass(slots=True)
class Loop:
    """A loop that the kernel is in; ``started`` and ``iteration`` are instruction numbers.

    ``scope`` is None if the loop is unrolled. ``reads`` (``parallel`` loops only) lists the reads of each storage as
    (instruction number, view, mask).
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

    ``has_data`` False: the run has shapes only. ``shuffle``: seed of a random order of ``affine_range`` iterations.
    ``fold`` (shape-only runs): of an outermost loop, record the first, second and last iteration; the second stands for
    all between. ``program`` is the running program's index in the launch grid ``grid``. ``shared_tensors`` are the
    tensors in shared HBM; ``shared_count`` is how many of them the running program has declared so far. ``kernel_code``
    is the code of a kernel that must declare shared HBM in its own body, else None.
    """

    def __init__(
        self, name: str, core: NeuronCore, *, has_data: bool = True, shuffle: int | None = None, fold: bool = False
    ) -> None:
        if has_data and fold:
            raise ValueError("fold=True skips iterations and needs a shape-only run: pass TensorSpecs, not arrays")
        self.core, self.has_data, self.fold = core, has_data, fold
        self.trace = Trace(name)
        self.loops: list[Loop] = []
        self.program: tuple[int, ...] = (0,)
        self.grid: tuple[int, ...] = (1,)
        self.shared_tensors: list[Any] = []
        self.shared_count = 0
        self.kernel_code: CodeType | None = None
        self._random = None if shuffle is None else random.Random(shuffle)

    def fail(self, rule: str, message: str, limit: object = None, actual: object = None) -> NoReturn:
        """Raise NkiError for ``rule`` at the kernel's current line."""
        raise NkiError(self.location(), rule, message, limit, actual)

    def location(self) -> str:
        """Return the ``file:line`` that the kernel is at."""
        frame = _kernel_frame()
        key = (frame.f_code.co_filename, frame.f_lineno)
        if key not in _locations:
            _locations[key] = f"{key[0]}:{key[1]}"
        return _locations[key]

    def at_top_level(self) -> bool:
        """Return whether the kernel is outside of loops and, if ``kernel_code`` is set, in that function itself."""
        return not self.loops and self.kernel_code in (None, _kernel_frame().f_code)

    def allocate(
        self,
        shape: tuple[int, ...],
        partition_axis: int,
        dtype: np.dtype,
        space: Space,
        name: str = "",
        content: np.ndarray | None = None,
    ) -> Storage:
        """Allocate memory for ``shape``; ``content`` is the data of an HBM tensor that exists before the kernel.

        Raises:
            NkiError: the shape has no elements, too many partitions, or too many bytes per partition.
        """
        partitions = shape[partition_axis] if shape else 1
        size = prod(shape)
        free_size = size // partitions if partitions else 0
        if size <= 0:
            self.fail("shape", f"a tensor of shape {shape} has no elements", "> 0 elements", size)
        if space is not Space.HBM and partitions > self.core.partitions:
            self.fail(
                "partitions", f"a tile of shape {shape} has too many partitions", self.core.partitions, partitions
            )
        per_partition = free_size * dtype.itemsize
        limit = {Space.SBUF: self.core.sbuf_usable_bytes, Space.PSUM: self.core.psum_partition_bytes}.get(space)
        if limit is not None and per_partition > limit:
            self.fail(
                "free size",
                f"a tile of shape {shape} exceeds the bytes of one {space.value} partition",
                limit,
                per_partition,
            )
        now = len(self.trace.instructions)
        record = Buffer(
            len(self.trace.buffers), name, space, shape, dtype_name(dtype), partitions, per_partition, now, now,
            self.location(), tuple([loop.index for loop in self.loops]), content is not None,
        )  # fmt: skip
        self.trace.buffers.append(record)
        data = None
        if self.has_data:
            data = unwritten(size, dtype) if content is None else np.ascontiguousarray(content).reshape(-1).copy()
        scope = next((loop.scope for loop in reversed(self.loops) if loop.scope), None)
        writers: dict[tuple[int, int, int, int], Engine] | None = {} if space is Space.PSUM else None
        return Storage(record, dtype, free_size, data, now, writers=writers, scope=scope)

    def check_scope(self, storage: Storage) -> None:
        """Raise NkiError if the storage was allocated in a loop body that has ended, or gave way to another tile."""
        if storage.assigned:
            self.fail("assigned result", "the result was assigned to a tile, which has its values now: use that tile")
        if storage.scope is not None and not storage.scope.open:
            self.fail(
                "scope",
                f"the buffer allocated at {storage.record.location}, in the body of the loop at {storage.scope.loop}, "
                "is used after that body: declare it before the loop",
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
        """Yield the indices of a loop of the kernel.

        ``parallel``: the race rules of ``affine_range`` apply. ``scoped``: buffers allocated in the body must not be
        used after it. Only such a loop is folded: the body of ``static_range`` may collect Python values in each
        iteration.
        """
        now = len(self.trace.instructions)
        loop = Loop(parallel, now, now, 0, self.location())
        order = list(indices)
        if parallel and self._random is not None:
            self._random.shuffle(order)
        folded = self.fold and scoped and not self.loops and len(order) > 3
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
        """Return the trace; if ``capacity``, first check SBUF and PSUM against the live ranges of all buffers.

        A PSUM tile counts in whole banks: a matmul writes one bank, and two tiles never share a bank here.

        Raises:
            NkiError: the live buffers exceed SBUF or PSUM.
        """
        banks, bank = self.core.psum_banks, self.core.psum_bank_bytes
        if capacity:
            self._check_capacity(Space.SBUF, self.core.sbuf_usable_bytes, 1, "bytes per partition")
            self._check_capacity(Space.PSUM, banks, bank, "banks")
        return self.trace

    def _check_capacity(self, space: Space, limit: int, unit_bytes: int, unit: str) -> None:
        events = []
        for buffer in self.trace.buffers:
            if buffer.space is space and buffer.released > buffer.allocated:
                size = -(-buffer.bytes_per_partition // unit_bytes)
                events += [(buffer.allocated, 1, size, buffer), (buffer.released, 0, -size, buffer)]
        events.sort(key=lambda event: event[:2])
        level = 0
        for _, _, size, buffer in events:
            level += size
            if level > limit:
                raise NkiError(
                    buffer.location,
                    f"{space.value} capacity",
                    f"allocating {buffer.shape} {buffer.dtype} here exceeds {space.value} ({unit}, all live tiles)",
                    limit,
                    level,
                )


def _kernel_frame() -> FrameType:
    """Return the innermost frame that belongs neither to the emulator nor to a dialect binding."""
    frame = sys._getframe(2)
    while True:
        file = frame.f_code.co_filename  # not the code object: two copies of a file have equal ones
        internal = _internal_files.get(file)
        if internal is None:
            internal = file.startswith(_PACKAGE) or "NKI_BINDING" in frame.f_globals
            _internal_files[file] = internal
        if not internal or frame.f_back is None:
            return frame
        frame = frame.f_back


_stack: list[Machine] = []


def current() -> Machine:
    """Return the machine of the running kernel.

    Raises:
        RuntimeError: no kernel is running.
    """
    if not _stack:
        raise RuntimeError("NKI functions work only inside a kernel: launch it with neuronmm.emulator.nki.run()")
    return _stack[-1]


def running() -> bool:
    """Return whether a kernel is running."""
    return bool(_stack)


def push(machine: Machine) -> None:
    """Begin a run: ``machine`` is the current machine until :func:`pop`."""
    _stack.append(machine)


def pop() -> None:
    """End the run that began last."""
    _stack.pop()
