"""One decode step of a Llama-style decoder as a trace: weights stream past a few tokens.

Every weight is read once, packed so that a transfer has rows of 4 KiB, through a ring of tiles. A weight tile is the
stationary operand, the tokens are the moving one. Each matmul waits for the activations before it; the stream of
weights does not. The KV cache is read once, by token. Norms, rotary embedding and softmax are elementwise passes.

The tensor engine multiplies weights in fp8 as they are. It cannot multiply int8: these are widened to bfloat16 on the
other engines, a chunk ahead of the matmuls, which share the columns of a chunk by their clocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from neuronmm.emulator.nki.trace import Buffer, Engine, Region, Space, Trace
from neuronmm.emulator.timing.sketch import ELEMENT_BYTES, Sketch, part
from neuronmm.kernels.hardware import TRN1, NeuronCore

CHUNK = 16
"""128 x 128 weight tiles of bf16 in one transfer: rows of 4 KiB."""
CACHE_PIECE = 8192
"""Elements per partition of one transfer of the KV cache."""
RINGS = 8
"""Allocation sites of weight chunks: with double buffering 16 transfers, 8 MiB, can be in flight."""


class Weight(NamedTuple):
    """A matrix (in, out) and the dtype in which it is stored: bfloat16, float8_e4m3, or int8."""

    rows: int
    columns: int
    dtype: str = "bfloat16"

    @property
    def bytes(self) -> int:
        """Bytes of the matrix."""
        return self.rows * self.columns * ELEMENT_BYTES[self.dtype]


Layer = list[list[Weight]]
"""The linears of a decoder layer, in order, grouped by the input that they share; attention follows the first group."""


def widening_engines(core: NeuronCore) -> list[Engine]:
    """Return the engines that widen int8: on NeuronCore-v2 GpSimd would only take turns with Vector."""
    shared = any({"vector", "gpsimd"} <= {one, other} for _, one, other in core.exclusive)
    return [Engine.VECTOR, Engine.SCALAR] + [Engine.GPSIMD] * (not shared)


def decoder_step(
    layers: list[tuple[Layer, int]], head: Weight, cache_bytes: int, tokens: int = 1, name: str = "decode",
    core: NeuronCore = TRN1,
) -> Trace:  # fmt: skip
    """Return the trace of one step of ``tokens`` tokens, at most 128.

    Args:
        layers: each kind of decoder layer and the number of such layers.
        head: the language-model head.
        cache_bytes: bytes of KV cache that one layer reads.
        tokens: tokens that pass the weights, one per sequence in decode.
        name: the trace's name.
        core: decides which engines widen int8.
    """
    step = _Step(name, tokens, core)
    for layer, times in layers:
        step.sketch.open_fold()
        for number, group in enumerate(layer):
            if number == 1:
                step.attend(cache_bytes)
            step.matmuls(group)
            step.elementwise()
        step.sketch.close_fold(times)
    step.matmuls([head])
    step.sketch.free(*step.activations)
    return step.sketch.trace


class _Step:
    """The trace under construction; matmuls read one of two activation tiles and write the other."""

    def __init__(self, name: str, tokens: int, core: NeuronCore) -> None:
        self.core = core
        self.sketch = Sketch(name)
        self.tokens = tokens
        self.weights = self.sketch.tensor("weights", 128, CHUNK * 128)
        self.activations = [self.sketch.tile(f"activations {i}", tokens) for i in range(2)]
        self.ring = self.turn = 0

    def matmuls(self, group: list[Weight]) -> None:
        """Write y = W x for linears that share their input."""
        for rows, columns, dtype in group:
            deep, wide = -(-rows // 128), -(-columns // 128)
            tiles = CHUNK * 2 // ELEMENT_BYTES[dtype]
            chunks = -(-deep * wide // tiles)
            row = -(-rows * columns // (128 * chunks))  # elements per row of a transfer: the tail is spread over all
            chunk: Any = None
            psum: Any = None
            ahead = self._load(row, dtype) if dtype == "int8" else None
            for tile in range(deep * wide):
                if tile % tiles == 0:
                    chunk = ahead or self._load(row, dtype)
                    if ahead is not None and tile + tiles < deep * wide:
                        ahead = self._load(row, dtype)
                if tile % deep == 0:
                    psum = self.sketch.tile("psum", self.tokens, "float32", Space.PSUM)
                moving = self._whole(self.activations[0])
                weight = part(chunk, 0, row)
                self.sketch.matmul(psum, weight, moving, self.tokens, chunk.dtype, tile % deep > 0)
                if tile % deep == deep - 1:
                    self._evict(psum)
                if tile % tiles == tiles - 1 or tile == deep * wide - 1:
                    self.sketch.free(chunk)
        self.activations.reverse()

    def attend(self, cache_bytes: int) -> None:
        """Stream the cache, with three passes over its scores: scale and mask, exponentials, sums."""
        scores = self._whole(self.activations[0])
        remaining = max(1, cache_bytes // 128 // 2)  # elements per partition
        while remaining > 0:
            row = min(remaining, CACHE_PIECE)
            cache = self.sketch.tile("cache", row)
            self.sketch.load(cache, 0, row, self.weights)
            for engine in (Engine.VECTOR, Engine.SCALAR, Engine.VECTOR):
                operands = (scores, part(cache, 0, 1))  # waits for the cache; the scores are what it reads
                elements = max(self.tokens, row // 64)  # one score per key of 64 or more elements
                self.sketch.elementwise(engine, "softmax", scores, operands, elements, "bfloat16")
            self.sketch.free(cache)
            remaining -= row

    def elementwise(self) -> None:
        """Write a norm or an activation between matmuls: three passes."""
        x = self._whole(self.activations[0])
        for engine in (Engine.SCALAR, Engine.VECTOR, Engine.SCALAR):
            self.sketch.elementwise(engine, "norm", x, (x,), self.tokens * CHUNK, "bfloat16")

    def _load(self, row: int, dtype: str) -> Buffer:
        chunk = self.sketch.tile(f"weights {self.ring % RINGS}", row, dtype)
        self.sketch.load(chunk, 0, row, self.weights)
        self.ring += 1
        return self._widen(chunk, row) if dtype == "int8" else chunk

    def _widen(self, chunk: Buffer, row: int) -> Buffer:
        """Copy a chunk to bfloat16; every engine takes as many columns as it copies while the others copy theirs."""
        wide = self.sketch.tile(f"widened {self.ring % 2}", row)
        engines = widening_engines(self.core)
        speed = sum(self.core.clocks[engine.value] for engine in engines)
        begin = 0
        for number, engine in enumerate(engines, 1):
            done = sum(self.core.clocks[other.value] for other in engines[:number])
            end = row if number == len(engines) else round(row * done / speed)
            if begin < end:
                columns = part(chunk, begin, end - begin), part(wide, begin, end - begin)
                self.sketch.elementwise(engine, "copy", columns[1], columns[:1], end - begin, "bfloat16")
            begin = end
        self.sketch.free(chunk)
        return wide

    def _evict(self, psum: Buffer) -> None:
        """Copy PSUM to SBUF, on the Vector and the Scalar engine in turn."""
        engine = (Engine.VECTOR, Engine.SCALAR)[self.turn % 2]
        target, source = self._whole(self.activations[1]), self._whole(psum)
        self.sketch.elementwise(engine, "copy", target, (source,), self.tokens, "bfloat16")
        self.sketch.free(psum)
        self.turn += 1

    def _whole(self, tile: Buffer) -> Region:
        return part(tile, 0, self.tokens)
