"""One decode step of a Llama-style decoder as a trace: weights stream past a few tokens.

Every weight is read once, packed so that a transfer has rows of 4 KiB, through a ring of tiles. A weight tile is the
stationary operand, the tokens are the moving one. Each matmul waits for the activations before it; the stream of
weights does not. The KV cache is read once, by token. Norms, rotary embedding and softmax are elementwise passes.
"""

from __future__ import annotations

from typing import Any

from neuronmm.emulator.nki.trace import Buffer, Engine, Region, Space, Trace
from neuronmm.emulator.timing.sketch import Sketch, part

CHUNK = 16
"""128 x 128 weight tiles in one transfer: rows of 4 KiB in bf16."""
CACHE_PIECE = 8192
"""Elements per partition of one transfer of the KV cache."""
RINGS = 8
"""Allocation sites of weight chunks: with double buffering 16 transfers, 8 MiB, can be in flight."""

Layer = list[list[tuple[int, int]]]
"""The linears of a decoder layer as (in, out), in order, grouped by the input that they share; attention follows the
first group."""


def decoder_step(
    layers: list[tuple[Layer, int]], head: tuple[int, int], cache_bytes: int, tokens: int = 1, name: str = "decode"
) -> Trace:
    """Return the trace of one step of ``tokens`` tokens, at most 128.

    Args:
        layers: each kind of decoder layer and the number of such layers.
        head: the language-model head, (in, out).
        cache_bytes: bytes of KV cache that one layer reads.
        tokens: tokens that pass the weights, one per sequence in decode.
        name: the trace's name.
    """
    step = _Step(name, tokens)
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

    def __init__(self, name: str, tokens: int) -> None:
        self.sketch = Sketch(name)
        self.tokens = tokens
        self.weights = self.sketch.tensor("weights", 128, CHUNK * 128)
        self.activations = [self.sketch.tile(f"activations {i}", tokens) for i in range(2)]
        self.ring = self.turn = 0

    def matmuls(self, group: list[tuple[int, int]]) -> None:
        """Write y = W x for linears that share their input."""
        for rows, columns in group:
            deep, wide = -(-rows // 128), -(-columns // 128)
            chunks = -(-deep * wide // CHUNK)
            row = -(-rows * columns // (128 * chunks))  # elements per row of a transfer: the tail is spread over all
            chunk: Any = None
            psum: Any = None
            for tile in range(deep * wide):
                if tile % CHUNK == 0:
                    chunk = self._load(row)
                if tile % deep == 0:
                    psum = self.sketch.tile("psum", self.tokens, "float32", Space.PSUM)
                moving = self._whole(self.activations[0])
                weight = part(chunk, 0, row)
                self.sketch.matmul(psum, weight, moving, self.tokens, "bfloat16", tile % deep > 0)
                if tile % deep == deep - 1:
                    self._evict(psum)
                if tile % CHUNK == CHUNK - 1 or tile == deep * wide - 1:
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
                operands = (scores, part(cache, 0, row))
                elements = max(self.tokens, row // 64)  # one score per key of 64 or more elements
                self.sketch.elementwise(engine, "softmax", scores, operands, elements, "bfloat16")
            self.sketch.free(cache)
            remaining -= row

    def elementwise(self) -> None:
        """Write a norm or an activation between matmuls: three passes."""
        x = self._whole(self.activations[0])
        for engine in (Engine.SCALAR, Engine.VECTOR, Engine.SCALAR):
            self.sketch.elementwise(engine, "norm", x, (x,), self.tokens * CHUNK, "bfloat16")

    def _load(self, row: int) -> Buffer:
        chunk = self.sketch.tile(f"weights {self.ring % RINGS}", row)
        self.sketch.load(chunk, 0, row, self.weights)
        self.ring += 1
        return chunk

    def _evict(self, psum: Buffer) -> None:
        """Copy PSUM to SBUF, on the Vector and the Scalar engine in turn."""
        engine = (Engine.VECTOR, Engine.SCALAR)[self.turn % 2]
        target, source = self._whole(self.activations[1]), self._whole(psum)
        self.sketch.elementwise(engine, "copy", target, (source,), self.tokens, "bfloat16")
        self.sketch.free(psum)
        self.turn += 1

    def _whole(self, tile: Buffer) -> Region:
        return part(tile, 0, self.tokens)
