"""Destination-passing primitives over ``nki`` 0.3 to 0.7 (Trainium 2 and 3; SDK 2.29 to 2.33).

It has the methods of :mod:`.dialect_neuronxcc`. Importing this module needs the Neuron SDK or the emulator.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nki.isa as nisa
import nki.language as nl

NKI_BINDING = True
"""Tells the emulator to report a broken rule at the kernel's line, not in this file."""


@dataclass
class Dialect(nl.NKIObject):
    """The primitives."""

    float32: Any = nl.float32

    def sbuf(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate an SBUF tile, partitions first."""
        return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)

    def psum(self, shape: tuple[int, ...]) -> Any:
        """Allocate a float32 PSUM tile that :meth:`matmul` accumulates into."""
        return nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)

    def hbm(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate a scratch tensor in HBM."""
        return nl.ndarray(shape, dtype=dtype, buffer=nl.hbm)

    def output(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate a tensor that the kernel returns."""
        return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)

    def at(self, tile: Any, index: tuple[Any, ...]) -> Any:
        """Return the part of a tile to write to; an index is a number or a (start, stop) pair."""
        if len(index) == 2:
            return tile[self._span(index[0]), self._span(index[1])]
        return tile[self._span(index[0]), self._span(index[1]), self._span(index[2])]

    def _span(self, index: Any) -> Any:
        return slice(index[0], index[1]) if isinstance(index, tuple) else index

    def rows(self, x: Any, first: int, partitions: int, stride: int, chunks: int, start: int, tokens: int) -> Any:
        """Return ``tokens`` columns from ``start`` of rows ``first + p * stride + c``: [partitions, chunks, tokens]."""
        width = x.shape[1]
        return x.ap([[stride * width, partitions], [width, chunks], [1, tokens]], offset=first * width + start)

    def row(self, x: Any, first: int, partitions: int, stride: int, chunks: int) -> Any:
        """Return features ``first + p * stride + c`` of ``x`` [size, 1], as one row: [1, partitions, chunks]."""
        return x.ap([[1, 1], [stride, partitions], [1, chunks]], offset=first)

    def columns(self, x: Any, token: int, tokens: int, first: int, partitions: int, stride: int, chunks: int) -> Any:
        """Return features ``first + p * stride + c`` of rows [token, token + tokens): [tokens, partitions, chunks]."""
        width = x.shape[1]
        return x.ap([[width, tokens], [stride, partitions], [1, chunks]], offset=token * width + first)

    def run(self, w: Any, offset: int, partitions: int, stride: int, length: int) -> Any:
        """Elements ``offset + p * stride + i`` of a flat HBM tensor: [partitions, length]."""
        return w.ap([[stride, partitions], [1, length]], offset=offset)

    def load(self, dst: Any, src: Any) -> None:
        """Move from HBM to SBUF."""
        nisa.dma_copy(dst=dst, src=src)

    def store(self, dst: Any, src: Any) -> None:
        """Move from SBUF to HBM."""
        nisa.dma_copy(dst=dst, src=src)

    def matmul(self, dst: Any, stationary: Any, moving: Any) -> None:
        """Compute ``dst += stationary^T moving``; the first matmul into a part of a :meth:`psum` tile overwrites it."""
        nisa.nc_matmul(dst, stationary, moving)

    def copy(self, dst: Any, src: Any) -> None:
        """Copy on the vector engine."""
        nisa.tensor_copy(dst, src)

    def copy_scalar(self, dst: Any, src: Any) -> None:
        """Copy on the scalar engine."""
        nisa.activation(dst, op=nl.copy, data=src)

    def silu(self, dst: Any, src: Any) -> None:
        """Compute ``dst = silu(src)`` on the scalar engine."""
        nisa.activation(dst, op=nl.silu, data=src)

    def square(self, dst: Any, src: Any) -> None:
        """Compute ``dst = src^2`` on the scalar engine."""
        nisa.activation(dst, op=nl.square, data=src)

    def rsqrt(self, dst: Any, src: Any, scale: float, bias: Any) -> None:
        """Compute ``dst = 1 / sqrt(src * scale + bias)`` on the scalar engine; ``bias`` is [partitions, 1]."""
        nisa.activation(dst, op=nl.rsqrt, data=src, scale=scale, bias=bias)

    def add(self, dst: Any, a: Any, b: Any) -> None:
        """Compute ``dst = a + b`` on the vector engine; at most one operand is in PSUM."""
        nisa.tensor_tensor(dst, a, b, op=nl.add)

    def add_column(self, dst: Any, a: Any, column: Any) -> None:
        """Compute ``dst = a + column`` on the vector engine; ``column`` is float32 [partitions, 1]."""
        nisa.tensor_scalar(dst, a, nl.add, column)

    def prepare_transposes(self, dtype: Any) -> None:
        """Do nothing: the tensor engine has a transpose mode from NeuronCore-v3 on."""

    def transpose(self, shape: tuple[int, ...], src: Any) -> Any:
        """Return ``src^T``, up to 128 x 128, as a PSUM tile of this shape and ``src``'s dtype."""
        transposed = nl.ndarray(shape, dtype=src.dtype, buffer=nl.psum)
        nisa.nc_transpose(transposed, src)
        return transposed

    def multiply(self, dst: Any, a: Any, b: Any) -> None:
        """Compute ``dst = a * b`` on the vector engine; at most one operand is in PSUM."""
        nisa.tensor_tensor(dst, a, b, op=nl.multiply)

    def scale(self, dst: Any, src: Any, column: Any) -> None:
        """Compute ``dst = src * column`` on the vector engine; ``column`` is float32 [partitions, 1]."""
        nisa.tensor_scalar(dst, src, nl.multiply, column)

    def scale_scalar(self, dst: Any, src: Any, column: Any) -> None:
        """Compute ``dst = src * column`` on the scalar engine; ``column`` is float32 [partitions, 1]."""
        nisa.activation(dst, op=nl.copy, data=src, scale=column)

    def scale_silu(self, dst: Any, src: Any, column: Any) -> None:
        """Compute ``dst = silu(src * column)`` on the scalar engine; ``column`` is float32 [partitions, 1]."""
        nisa.activation(dst, op=nl.silu, data=src, scale=column)

    def scale_add(self, dst: Any, src: Any, column: Any, b: Any) -> None:
        """Compute ``dst = src * column + b`` on the vector engine; ``src`` or ``b`` is in SBUF."""
        nisa.scalar_tensor_tensor(dst, data=src, op0=nl.multiply, operand0=column, op1=nl.add, operand1=b)

    def scale_multiply(self, dst: Any, src: Any, column: Any, b: Any) -> None:
        """Compute ``dst = src * column * b`` on the vector engine; ``src`` or ``b`` is in SBUF."""
        nisa.scalar_tensor_tensor(dst, data=src, op0=nl.multiply, operand0=column, op1=nl.multiply, operand1=b)

    def scale_add_column(self, dst: Any, src: Any, column: Any, bias: Any) -> None:
        """Compute ``dst = src * column + bias`` on the vector engine; both are float32 [partitions, 1]."""
        nisa.tensor_scalar(dst, src, nl.multiply, column, op1=nl.add, operand1=bias)

    def fill(self, tile: Any, value: float) -> None:
        """Set every element of a tile to ``value``."""
        nisa.memset(tile, value)

    def loop(self, count: int) -> Any:
        """Iterate without dependences between iterations; this dialect unrolls the loop."""
        return self.static_range(count)

    def static_range(self, count: int) -> list[int]:
        """Unroll the loop. The result is a list: in this language a ``range`` is the head of a loop and not a value."""
        indices = []
        for i in range(count):
            indices.append(i)
        return indices
