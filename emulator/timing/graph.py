"""Time of a whole HLO graph on one NeuronCore: what the emulated hosts run, walked with the timing model.

Products with weights stream them from HBM past the tokens, as in :mod:`.decode`; the stream runs ahead of everything
that waits for activations. Products of activations, caches included, and elementwise instructions run one after the
other, each a pass over all 128 partitions: what a compiler fuses is not fused here, so a long prefill comes out too
slow. Reshapes, transposes, broadcasts and conversions (engines convert as they read and write) are free. Like layers
are found by their repetition and simulated as one loop. NKI kernels are simulated on their own, collectives have a
fixed latency, and neither overlaps with anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from neuronmm.emulator.hlo.custom import TARGET, TRANSFER
from neuronmm.emulator.hlo.memory import NEVER_CONSTANT
from neuronmm.emulator.hlo.node import ACROSS
from neuronmm.emulator.hlo.program import live_instructions
from neuronmm.emulator.nki.framework import trace_of
from neuronmm.emulator.nki.trace import Buffer, Engine, Region, Space
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
"""Elementwise passes of a custom call; one for any other."""
_MOVING = 512
"""Columns of a product, and of a PSUM bank in float32."""


@dataclass(frozen=True)
class GraphTime:
    """Predicted seconds of one run of a graph on every core; ``hbm_read`` is the bytes one core reads.

    ``seconds`` is the sum of ``stream`` (all that is not below), ``kernels`` (NKI) and ``collectives``.
    """

    stream: float
    kernels: float
    collectives: float
    hbm_read: int

    @property
    def seconds(self) -> float:
        """The time of the graph."""
        return self.stream + self.kernels + self.collectives


class _Work(NamedTuple):
    """One step of the walk. ``sizes``: of a product with weights (rows, columns, tokens), of one of activations
    (batch, contracted, smaller side, larger side, bytes from HBM), of a transfer (bytes,), else (elements,)."""

    kind: str
    dtype: str
    sizes: tuple[int, ...]
    detail: Any = None


def predict_graph(module: Any, core: NeuronCore) -> GraphTime:
    """The predicted time of an HloModuleProto, as hosts keep it in ``kernel.hlo_module``.

    Raises:
        KeyError: the graph holds an NKI kernel of another process.
        CapacityError: an NKI kernel's tiles do not fit.
    """
    works = _walk(module)
    kernels, kernel_bytes = 0.0, 0
    for config, times in Counter(w.detail for w in works if w.kind == "kernel").items():
        summary = report(simulate(trace_of(config), core))
        kernels, kernel_bytes = kernels + times * summary.latency, kernel_bytes + times * summary.hbm_read
    collectives = sum(w.kind == "collective" for w in works) * ALL_REDUCE_NS / 1e9
    schedule = _Schedule(module.name)
    streamed = [w for w in works if w.kind not in ("kernel", "collective")]
    start, period, times = _repetition(streamed)
    for work in streamed[:start]:
        schedule.add(work)
    if times:
        schedule.sketch.open_fold()
        for work in streamed[start : start + period]:
            schedule.add(work)
        schedule.sketch.close_fold(times)
    for work in streamed[start + period * times :]:
        schedule.add(work)
    if not streamed:
        return GraphTime(0.0, kernels, collectives, kernel_bytes)
    stream = report(simulate(schedule.finish(), core))
    return GraphTime(stream.latency, kernels, collectives, kernel_bytes + stream.hbm_read)


def _walk(module: Any) -> list[_Work]:
    """The graph's instructions that take time, in order."""
    instructions = live_instructions(module)
    caches = {e.parameter_number for e in module.input_output_alias.entries}
    source: dict[int, Any] = {}  # id -> the parameter that the value is, but for its shape
    constant: set[int] = set()
    shapes = {i.id: i.shape for i in instructions}
    works = []
    for i in instructions:
        operands = list(i.operand_ids)
        if i.opcode == "parameter":
            source[i.id] = i
        elif i.opcode not in NEVER_CONSTANT and all(o in constant for o in operands):
            constant.add(i.id)
        elif i.opcode in _FREE or i.custom_call_target == TRANSFER:
            if operands[0] in source:
                source[i.id] = source[operands[0]]
        else:
            works.append(_work(i, [shapes[o] for o in operands], [source.get(o) for o in operands], caches))
    return works


def _work(i: Any, shapes: list[Any], sources: list[Any], caches: set[int]) -> _Work:
    dtype = str(DTYPES.get(shapes[0].element_type if shapes else 0, "float32")).removeprefix("torch.")
    if i.custom_call_target == TARGET:
        return _Work("kernel", dtype, (), i.backend_config)
    if i.opcode in ACROSS:
        return _Work("collective", dtype, ())
    if i.opcode == "dot":
        return _dot(i, shapes, sources, caches, dtype)
    if i.opcode in ("gather", "dynamic-slice"):
        return _Work("load", dtype, (_bytes(i.shape),))
    if i.opcode in ("scatter", "dynamic-update-slice"):
        return _Work("store", dtype, (_bytes(shapes[2 if i.opcode == "scatter" else 1]),))
    elements = max(math.prod(s.dimensions) for s in [*shapes, i.shape])
    engine = Engine.SCALAR if i.opcode in _ON_SCALAR else Engine.VECTOR
    return _Work("elementwise", dtype, (-(-elements // 128), _PASSES.get(i.custom_call_target, 1)), engine)


def _dot(i: Any, shapes: list[Any], sources: list[Any], caches: set[int], dtype: str) -> _Work:
    n = i.dot_dimension_numbers
    left, right = (list(s.dimensions) for s in shapes)
    batch = math.prod(left[d] for d in n.lhs_batch_dimensions)
    contracted = math.prod(left[d] for d in n.lhs_contracting_dimensions)
    sides = [math.prod(size) // max(1, batch * contracted) for size in (left, right)]
    weights = [s is not None and s.parameter_number not in caches for s in sources]
    if batch == 1 and any(weights):
        weight = 0 if weights[0] and (not weights[1] or sides[0] >= sides[1]) else 1
        return _Work("product", dtype, (contracted, sides[weight], sides[1 - weight]))
    stored = sum(_bytes(s.shape) for s in sources if s is not None)
    return _Work("attention", dtype, (batch, contracted, min(sides), max(sides), stored))


def _bytes(shape: Any) -> int:
    return math.prod(shape.dimensions) * DTYPES[shape.element_type].itemsize


def _repetition(works: list[_Work]) -> tuple[int, int, int]:
    """(start, period, times) of the longest stretch that repeats itself; times 0: none does."""
    best = (0, 0, 0)
    for period in range(1, len(works) // 2 + 1):
        run = 0
        for at in range(len(works) - period):
            run = run + 1 if works[at] == works[at + period] else 0
            times = run // period + 1
            if times > 1 and period * times > best[1] * best[2]:
                best = (at - run + 1, period, times)
    return best


class _Schedule:
    """The instructions under construction; work reads one of two activation tiles and may write the other."""

    def __init__(self, name: str) -> None:
        self.sketch = Sketch(name)
        self.memory = self.sketch.tensor("memory", 128, CHUNK * 128)
        self.activations = [self.sketch.tile(f"activations {i}", STRIP) for i in range(2)]
        self.turn = self.ring = 0

    def add(self, work: _Work) -> None:
        """Write one step."""
        steps: dict[str, Callable[..., None]] = {
            "product": self._product,
            "attention": self._attention,
            "elementwise": self._elementwise,
            "load": self._load,
            "store": self._store,
        }
        steps[work.kind](work)

    def finish(self) -> Any:
        """The trace."""
        self.sketch.free(*self.activations)
        return self.sketch.trace

    def _product(self, work: _Work) -> None:
        """Strips of tokens; in each, every weight tile passes once, a column of tiles after the other."""
        rows, columns, tokens = work.sizes
        deep, wide = -(-rows // 128), -(-columns // 128)
        chunks = -(-deep * wide // CHUNK)
        row = -(-rows * columns // (128 * chunks))  # elements of one transfer's row: tails cost what they are
        for strip in range(0, tokens, STRIP):
            moving = _cut(min(STRIP, tokens - strip))
            chunk: Any = None
            sums: list[Any] = []
            for tile in range(deep * wide):
                if tile % CHUNK == 0:
                    chunk = self._tile(f"weights {self.ring % RINGS}", row, work.dtype)
                    self.sketch.load(chunk, 0, row, self.memory)
                    self.ring += 1
                if tile % deep == 0:
                    sums = [self._psum(n) for n in moving]
                for psum, n in zip(sums, moving, strict=True):
                    self.sketch.matmul(
                        psum, part(chunk, 0, row), self._first(n), n, work.dtype, accumulate=tile % deep > 0
                    )
                if tile % deep == deep - 1:
                    for psum, n in zip(sums, moving, strict=True):
                        self._evict(psum, n, work.dtype)
                if tile % CHUNK == CHUNK - 1 or tile == deep * wide - 1:
                    self.sketch.free(chunk)
        self.activations.reverse()

    def _attention(self, work: _Work) -> None:
        """Operands from the cache are loaded whole; the side moves with which the fewer columns move in all,
        and a bank of PSUM collects the results of several products."""
        batch, contracted, small, large, stored = work.sizes
        still, moving = min(((small, large), (large, small)), key=lambda way: -(-way[0] // 128) * max(way[1], 64))
        if stored:
            self._move(stored, self.sketch.load)
        products = [n for _ in range(batch * -(-still // 128)) for n in _cut(moving)]
        while products:
            bank = [products.pop()]
            while products and sum(bank) + products[-1] <= _MOVING:
                bank.append(products.pop())
            psum = self._psum(sum(bank))
            for n in bank:
                for depth in range(-(-contracted // 128)):
                    self.sketch.matmul(psum, self._first(128), self._first(n), n, work.dtype, accumulate=depth > 0)
            self._evict(psum, sum(bank), work.dtype)
        self.activations.reverse()

    def _elementwise(self, work: _Work) -> None:
        elements, passes = work.sizes
        x = self._first(1)
        for _ in range(passes):
            self.sketch.elementwise(work.detail, "elementwise", x, (x,), elements, work.dtype)

    def _load(self, work: _Work) -> None:
        self._move(work.sizes[0], self.sketch.load)

    def _store(self, work: _Work) -> None:
        self._move(work.sizes[0], self.sketch.store)

    def _move(self, size: int, transfer: Any) -> None:
        left = max(1, size // 128 // 2)
        while left > 0:
            row = min(left, CACHE_PIECE)
            tile = self._tile("cache", row, "bfloat16")
            if transfer == self.sketch.load:
                self.sketch.load(tile, 0, row, self.memory)
                x = self._first(1)
                self.sketch.elementwise(Engine.VECTOR, "use", x, (x, part(tile, 0, row)), 1, "bfloat16")
            else:
                self.sketch.elementwise(Engine.VECTOR, "make", part(tile, 0, row), (self._first(1),), 1, "bfloat16")
                self.sketch.store(self.memory, tile, 0, row)
            self.sketch.free(tile)
            left -= row

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


def _cut(tokens: int) -> list[int]:
    """Columns of the products for so many tokens."""
    return [min(_MOVING, tokens - at) for at in range(0, tokens, _MOVING)]
