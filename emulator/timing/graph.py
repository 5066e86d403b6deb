"""The time of a whole HLO graph on one NeuronCore: walk the graph that a host compiled with the timing model.

Matmuls with weights stream them from HBM past the tokens, as in :mod:`.decode`; the stream does not wait for
activations. Matmuls of activations, caches included, and elementwise instructions run one after the other, each a pass
over all 128 partitions. The compiler would fuse some of them, so the prediction of a long prefill is too slow.
Reshapes, transposes, broadcasts and conversions (engines convert as they read and write) are free. Repeated layers are
detected and simulated as one loop. NKI kernels are simulated separately, collectives have a fixed latency; neither
overlaps with anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from neuronmm.emulator.hlo.custom import TARGET, TRANSFER
from neuronmm.emulator.hlo.memory import NEVER_CONSTANT
from neuronmm.emulator.hlo.node import COLLECTIVES
from neuronmm.emulator.hlo.program import live_instructions
from neuronmm.emulator.nki.framework import trace_of
from neuronmm.emulator.nki.trace import Buffer, Engine, Region, Space, Trace
from neuronmm.emulator.pyhlo.literal import DTYPES
from neuronmm.emulator.timing.decode import CACHE_PIECE, CHUNK, RINGS
from neuronmm.emulator.timing.inference import ALL_REDUCE_NS, STRIP
from neuronmm.emulator.timing.report import report
from neuronmm.emulator.timing.simulate import simulate
from neuronmm.emulator.timing.sketch import Sketch, part
from neuronmm.kernels.hardware import NeuronCore

_FREE = {
    "reshape",
    "transpose",
    "broadcast",
    "slice",
    "convert",
    "get-tuple-element",
    "tuple",
}
_ON_SCALAR = {"exponential", "logistic", "rsqrt", "sqrt", "tanh", "sine", "cosine", "log"}
_PASSES = {"AwsNeuronRmsNorm": 4, "AwsNeuronSoftmax": 4}
"""Elementwise passes of a custom call; other custom calls take one."""
_MOVING = 512
"""Columns of the moving operand of a matmul, and of a PSUM bank in float32."""


@dataclass(frozen=True)
class GraphTime:
    """The predicted time of one run of a graph, in seconds; all cores run it at the same time.

    Attributes:
        stream: everything but NKI kernels and collectives.
        kernels: NKI kernels.
        collectives: collectives.
        hbm_read: bytes that one core reads from HBM.
    """

    stream: float
    kernels: float
    collectives: float
    hbm_read: int

    @property
    def seconds(self) -> float:
        """The total."""
        return self.stream + self.kernels + self.collectives


class _Task(NamedTuple):
    """One instruction that takes time; the meaning of ``sizes`` and ``detail`` depends on ``kind``.

    ==============  ===================================================================  ==================
    kind            sizes                                                                detail
    ==============  ===================================================================  ==================
    weight matmul   (rows, columns, tokens)
    attention       (batch, contracted, smaller side, larger side, bytes from HBM)
    elementwise     (elements per partition, passes)                                     the engine
    load, store     (bytes,)
    kernel          ()                                                                   the backend_config
    collective      ()
    ==============  ===================================================================  ==================

    ``attention`` is any matmul of activations or caches.
    """

    kind: str
    dtype: str
    sizes: tuple[int, ...]
    detail: Any = None


def predict_graph(module: Any, core: NeuronCore) -> GraphTime:
    """Predict the time of an HloModuleProto; hosts store theirs in ``kernel.hlo_module``.

    Raises:
        KeyError: the graph contains an NKI kernel that was built in another process.
        CapacityError: an NKI kernel's tiles do not fit SBUF or PSUM.
    """
    tasks = _tasks(module)
    kernels, kernel_bytes = 0.0, 0
    for config, times in Counter(task.detail for task in tasks if task.kind == "kernel").items():
        summary = report(simulate(trace_of(config), core))
        kernels, kernel_bytes = kernels + times * summary.latency, kernel_bytes + times * summary.hbm_read
    collectives = sum(task.kind == "collective" for task in tasks) * ALL_REDUCE_NS / 1e9
    schedule = _Schedule(module.name)
    streamed = [task for task in tasks if task.kind not in ("kernel", "collective")]
    start, period, times = _repetition(streamed)
    for task in streamed[:start]:
        schedule.add(task)
    if times:
        schedule.sketch.open_fold()
        for task in streamed[start : start + period]:
            schedule.add(task)
        schedule.sketch.close_fold(times)
    for task in streamed[start + period * times :]:
        schedule.add(task)
    if not streamed:
        return GraphTime(0.0, kernels, collectives, kernel_bytes)
    stream = report(simulate(schedule.finish(), core))
    return GraphTime(stream.latency, kernels, collectives, kernel_bytes + stream.hbm_read)


def _tasks(module: Any) -> list[_Task]:
    """Return the tasks of a graph, in order."""
    instructions = live_instructions(module)
    caches = {e.parameter_number for e in module.input_output_alias.entries}
    source: dict[int, Any] = {}  # id -> the parameter whose elements the value has
    constant: set[int] = set()
    shapes = {i.id: i.shape for i in instructions}
    tasks = []
    for i in instructions:
        operands = list(i.operand_ids)
        if i.opcode == "parameter":
            source[i.id] = i
        elif i.opcode not in NEVER_CONSTANT and all(o in constant for o in operands):
            constant.add(i.id)
        elif i.opcode == "replica-id":
            continue  # a number that the core knows
        elif i.opcode in _FREE or i.custom_call_target == TRANSFER:
            if operands[0] in source:
                source[i.id] = source[operands[0]]
        else:
            tasks.append(_task(i, [shapes[o] for o in operands], [source.get(o) for o in operands], caches))
    return tasks


def _task(i: Any, shapes: list[Any], sources: list[Any], caches: set[int]) -> _Task:
    dtype = str(DTYPES.get(shapes[0].element_type if shapes else 0, "float32")).removeprefix("torch.")
    if i.custom_call_target == TARGET:
        return _Task("kernel", dtype, (), i.backend_config)
    if i.opcode in COLLECTIVES:
        return _Task("collective", dtype, ())
    if i.opcode == "dot":
        return _dot(i, shapes, sources, caches, dtype)
    if i.opcode in ("gather", "dynamic-slice"):
        return _Task("load", dtype, (_bytes(i.shape),))
    if i.opcode in ("scatter", "dynamic-update-slice"):
        return _Task("store", dtype, (_bytes(shapes[2 if i.opcode == "scatter" else 1]),))
    elements = max(math.prod(s.dimensions) for s in [*shapes, i.shape])
    engine = Engine.SCALAR if i.opcode in _ON_SCALAR else Engine.VECTOR
    return _Task("elementwise", dtype, (-(-elements // 128), _PASSES.get(i.custom_call_target, 1)), engine)


def _dot(i: Any, shapes: list[Any], sources: list[Any], caches: set[int], dtype: str) -> _Task:
    n = i.dot_dimension_numbers
    left, right = (list(s.dimensions) for s in shapes)
    batch = math.prod(left[d] for d in n.lhs_batch_dimensions)
    contracted = math.prod(left[d] for d in n.lhs_contracting_dimensions)
    sides = [math.prod(size) // max(1, batch * contracted) for size in (left, right)]
    weights = [s is not None and s.parameter_number not in caches for s in sources]
    if batch == 1 and any(weights):
        weight = 0 if weights[0] and (not weights[1] or sides[0] >= sides[1]) else 1
        return _Task("weight matmul", dtype, (contracted, sides[weight], sides[1 - weight]))
    stored = sum(_bytes(s.shape) for s in sources if s is not None)
    return _Task("attention", dtype, (batch, contracted, min(sides), max(sides), stored))


def _bytes(shape: Any) -> int:
    return math.prod(shape.dimensions) * DTYPES[shape.element_type].itemsize


def _repetition(tasks: list[_Task]) -> tuple[int, int, int]:
    """Return (start, period, times) of the longest periodic stretch; times is 0 if there is none."""
    best = (0, 0, 0)
    for period in range(1, len(tasks) // 2 + 1):
        matches = 0
        for i in range(len(tasks) - period):
            matches = matches + 1 if tasks[i] == tasks[i + period] else 0
            times = matches // period + 1
            if times > 1 and period * times > best[1] * best[2]:
                best = (i - matches + 1, period, times)
    return best


class _Schedule:
    """The trace under construction; a task reads one of two activation tiles and may write the other."""

    def __init__(self, name: str) -> None:
        self.sketch = Sketch(name)
        self.memory = self.sketch.tensor("memory", 128, CHUNK * 128)
        self.activations = [self.sketch.tile(f"activations {i}", STRIP) for i in range(2)]
        self.turn = self.ring = 0

    def add(self, task: _Task) -> None:
        """Write the instructions of one task."""
        writers: dict[str, Callable[..., None]] = {
            "weight matmul": self._weight_matmul,
            "attention": self._attention,
            "elementwise": self._elementwise,
            "load": self._load,
            "store": self._store,
        }
        writers[task.kind](task)

    def finish(self) -> Trace:
        """Free the activation tiles and return the trace."""
        self.sketch.free(*self.activations)
        return self.sketch.trace

    def _weight_matmul(self, task: _Task) -> None:
        """Cut the tokens into strips; for each strip stream every weight tile once, column by column of tiles."""
        rows, columns, tokens = task.sizes
        deep, wide = -(-rows // 128), -(-columns // 128)
        chunks = -(-deep * wide // CHUNK)
        row = -(-rows * columns // (128 * chunks))  # elements per row of a transfer: the tail is spread over all
        for strip in range(0, tokens, STRIP):
            moving = _column_blocks(min(STRIP, tokens - strip))
            chunk: Any = None
            sums: list[Any] = []
            for tile in range(deep * wide):
                if tile % CHUNK == 0:
                    chunk = self._tile(f"weights {self.ring % RINGS}", row, task.dtype)
                    self.sketch.load(chunk, 0, row, self.memory)
                    self.ring += 1
                if tile % deep == 0:
                    sums = [self._psum(n) for n in moving]
                for psum, n in zip(sums, moving, strict=True):
                    self.sketch.matmul(
                        psum, part(chunk, 0, row), self._first(n), n, task.dtype, accumulate=tile % deep > 0
                    )
                if tile % deep == deep - 1:
                    for psum, n in zip(sums, moving, strict=True):
                        self._evict(psum, n, task.dtype)
                if tile % CHUNK == CHUNK - 1 or tile == deep * wide - 1:
                    self.sketch.free(chunk)
        self.activations.reverse()

    def _attention(self, task: _Task) -> None:
        """Load operands from the cache whole. The moving side is the one with fewer columns to move in total; one PSUM
        bank collects the results of several matmuls."""
        batch, contracted, small, large, stored = task.sizes
        still, moving = min(((small, large), (large, small)), key=lambda way: -(-way[0] // 128) * max(way[1], 64))
        if stored:
            self._move(stored, self.sketch.load)
        columns = [n for _ in range(batch * -(-still // 128)) for n in _column_blocks(moving)]
        while columns:
            bank = [columns.pop()]
            while columns and sum(bank) + columns[-1] <= _MOVING:
                bank.append(columns.pop())
            psum = self._psum(sum(bank))
            for n in bank:
                for depth in range(-(-contracted // 128)):
                    self.sketch.matmul(psum, self._first(128), self._first(n), n, task.dtype, accumulate=depth > 0)
            self._evict(psum, sum(bank), task.dtype)
        self.activations.reverse()

    def _elementwise(self, task: _Task) -> None:
        elements, passes = task.sizes
        x = self._first(1)
        for _ in range(passes):
            self.sketch.elementwise(task.detail, "elementwise", x, (x,), elements, task.dtype)

    def _load(self, task: _Task) -> None:
        self._move(task.sizes[0], self.sketch.load)

    def _store(self, task: _Task) -> None:
        self._move(task.sizes[0], self.sketch.store)

    def _move(self, size: int, transfer: Any) -> None:
        remaining = max(1, size // 128 // 2)  # elements per partition
        while remaining > 0:
            row = min(remaining, CACHE_PIECE)
            tile = self._tile("cache", row, "bfloat16")
            if transfer == self.sketch.load:
                self.sketch.load(tile, 0, row, self.memory)
                x = self._first(1)
                self.sketch.elementwise(Engine.VECTOR, "use", x, (x, part(tile, 0, row)), 1, "bfloat16")
            else:
                self.sketch.elementwise(Engine.VECTOR, "make", part(tile, 0, row), (self._first(1),), 1, "bfloat16")
                self.sketch.store(self.memory, tile, 0, row)
            self.sketch.free(tile)
            remaining -= row

    def _evict(self, psum: Buffer, n: int, dtype: str) -> None:
        engine = (Engine.VECTOR, Engine.SCALAR)[self.turn % 2]
        target = part(self.activations[1], 0, n)
        self.sketch.elementwise(engine, "copy", target, (part(psum, 0, n),), n, dtype)
        self.sketch.free(psum)
        self.turn += 1

    def _psum(self, n: int) -> Buffer:
        return self.sketch.tile("psum", n, "float32", Space.PSUM)

    def _tile(self, name: str, columns: int, dtype: str) -> Buffer:
        return self.sketch.tile(name, columns, dtype if dtype in ("float32", "bfloat16", "float16") else "float32")

    def _first(self, n: int) -> Region:
        return part(self.activations[0], 0, n)


def _column_blocks(tokens: int) -> list[int]:
    """Return the columns of each matmul for ``tokens`` tokens."""
    return [min(_MOVING, tokens - start) for start in range(0, tokens, _MOVING)]
