"""Destination-passing primitives over ``neuronxcc.nki`` (Trainium 1, Inferentia 2; SDK up to 2.29).

The kernels call these primitives and nothing else of NKI, so one body serves both dialects. :mod:`.dialect_nki` has the
same methods. Importing this module needs the Neuron SDK or the emulator.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

NKI_BINDING = True
"""Tells the emulator to report a broken rule at the kernel's line, not in this file."""


@dataclass
class Dialect:
    """The primitives, for one run of a kernel; ``identity`` is a tile of that run."""

    float32: Any = nl.float32
    identity: Any = None

    def sbuf(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate an SBUF tile, partitions first."""
        return nl.ndarray((nl.par_dim(shape[0]), *shape[1:]), dtype=dtype, buffer=nl.sbuf)

    def psum(self, shape: tuple[int, ...]) -> Any:
        """Allocate a float32 PSUM tile that :meth:`matmul` accumulates into."""
        return nl.zeros((nl.par_dim(shape[0]), *shape[1:]), dtype=nl.float32, buffer=nl.psum)

    def hbm(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate a scratch tensor in HBM."""
        return nl.ndarray(shape, dtype=dtype, buffer=nl.private_hbm)

    def at(self, tile: Any, index: tuple[Any, ...]) -> Any:
        """Return tile and key of a part to write, ``tile[key] = ...``; an index is a number or a (start, stop) pair."""
        return tile, tuple([slice(*i) if isinstance(i, tuple) else i for i in index])

    def rows(self, x: Any, first: int, partitions: int, stride: int, chunks: int, start: int, tokens: int) -> Any:
        """Return ``tokens`` columns from ``start`` of rows ``first + p * stride + c``: [partitions, chunks, tokens]."""
        p = nl.arange(partitions)[:, None, None]
        c = nl.arange(chunks)[None, :, None]
        t = nl.arange(tokens)[None, None, :]
        return x[first + p * stride + c, start + t]

    def row(self, x: Any, first: int, partitions: int, stride: int, chunks: int) -> Any:
        """Return features ``first + p * stride + c`` of ``x`` [size, 1], as one row: [1, partitions, chunks]."""
        t = nl.arange(1)[:, None, None]
        p = nl.arange(partitions)[None, :, None]
        c = nl.arange(chunks)[None, None, :]
        return x[first + p * stride + c, t]

    def columns(self, x: Any, token: int, tokens: int, first: int, partitions: int, stride: int, chunks: int) -> Any:
        """Return features ``first + p * stride + c`` of rows [token, token + tokens): [tokens, partitions, chunks]."""
        t = nl.arange(tokens)[:, None, None]
        p = nl.arange(partitions)[None, :, None]
        c = nl.arange(chunks)[None, None, :]
        return x[token + t, first + p * stride + c]

    def run(self, w: Any, offset: int, partitions: int, stride: int, length: int) -> Any:
        """Elements ``offset + p * stride + i`` of a flat HBM tensor: [partitions, length]."""
        p = nl.arange(partitions)[:, None]
        i = nl.arange(length)[None, :]
        return w[offset + p * stride + i]

    def load(self, dst: Any, src: Any) -> None:
        """Move from HBM to SBUF."""
        tile, key = dst
        tile[key] = nl.load(src)

    def store(self, dst: Any, src: Any) -> None:
        """Move from SBUF to HBM."""
        nl.store(dst, value=src)

    def matmul(self, dst: Any, stationary: Any, moving: Any) -> None:
        """Compute ``dst += stationary^T moving``; the first matmul into a part of a :meth:`psum` tile overwrites it."""
        tile, key = dst
        tile[key] += nisa.nc_matmul(stationary, moving)

    def copy(self, dst: Any, src: Any) -> None:
        """Copy on the vector engine."""
        tile, key = dst
        tile[key] = nisa.tensor_copy(src, dtype=tile.dtype)

    def copy_scalar(self, dst: Any, src: Any) -> None:
        """Copy on the scalar engine."""
        tile, key = dst
        tile[key] = nisa.activation(op=nl.copy, data=src, dtype=tile.dtype)

    def silu(self, dst: Any, src: Any) -> None:
        """Compute ``dst = silu(src)`` on the scalar engine."""
        tile, key = dst
        tile[key] = nisa.activation(op=nl.silu, data=src, dtype=tile.dtype)

    def square(self, dst: Any, src: Any) -> None:
        """Compute ``dst = src^2`` on the scalar engine."""
        tile, key = dst
        tile[key] = nisa.activation(op=nl.square, data=src, dtype=tile.dtype)

    def rsqrt(self, dst: Any, src: Any, scale: float, bias: Any) -> None:
        """Compute ``dst = 1 / sqrt(src * scale + bias)`` on the scalar engine; ``bias`` is [partitions, 1]."""
        tile, key = dst
        tile[key] = nisa.activation(op=nl.rsqrt, data=src, scale=scale, bias=bias, dtype=tile.dtype)

    def add(self, dst: Any, a: Any, b: Any) -> None:
        """Compute ``dst = a + b`` on the vector engine; at most one operand is in PSUM."""
        tile, key = dst
        tile[key] = nisa.tensor_tensor(a, b, op=nl.add, dtype=tile.dtype)

    def add_column(self, dst: Any, a: Any, column: Any) -> None:
        """Compute ``dst = a + column`` on the vector engine; ``column`` is float32 [partitions, 1]."""
        tile, key = dst
        tile[key] = nisa.tensor_scalar(a, nl.add, column, dtype=tile.dtype)

    def prepare_transposes(self, dtype: Any) -> None:
        """Load the identity that :meth:`transpose` needs for tiles of this dtype; call it outside all loops."""
        if self._needs_identity(dtype):
            size = nl.tile_size.pmax
            self.identity = self.sbuf((size, size), dtype)
            self.identity[...] = nl.load(nl.shared_identity_matrix(size, dtype=dtype))

    def transpose(self, shape: tuple[int, ...], src: Any) -> Any:
        """Return ``src^T``, up to 128 x 128, as a PSUM tile of this shape.

        On NeuronCore-v2 the tensor engine writes only float32; later versions keep the dtype. On v2 a float32 tile is
        multiplied by an identity, because ``nc_transpose`` of float32 is reported to be inexact there.
        """
        is_v2 = nisa.get_nc_version() == nisa.nc_version.gen2
        dtype = nl.float32 if is_v2 else src.dtype
        transposed = nl.ndarray((nl.par_dim(shape[0]), *shape[1:]), dtype=dtype, buffer=nl.psum)
        if self._needs_identity(src.dtype):
            identity = self.identity[0 : src.shape[0], 0 : src.shape[0]]
            transposed[...] = nisa.nc_matmul(src, identity, is_moving_onezero=True, is_transpose=True)
        else:
            transposed[...] = nisa.nc_transpose(src)
        return transposed

    def _needs_identity(self, dtype: Any) -> bool:
        return nisa.get_nc_version() == nisa.nc_version.gen2 and dtype == nl.float32

    def multiply(self, dst: Any, a: Any, b: Any) -> None:
        """Compute ``dst = a * b`` on the vector engine; at most one operand is in PSUM."""
        tile, key = dst
        tile[key] = nisa.tensor_tensor(a, b, op=nl.multiply, dtype=tile.dtype)

    def scale(self, dst: Any, src: Any, column: Any) -> None:
        """Compute ``dst = src * column`` on the vector engine; ``column`` is float32 [partitions, 1]."""
        tile, key = dst
        tile[key] = nisa.tensor_scalar(src, nl.multiply, column, dtype=tile.dtype)

    def scale_scalar(self, dst: Any, src: Any, column: Any) -> None:
        """Compute ``dst = src * column`` on the scalar engine; ``column`` is float32 [partitions, 1]."""
        tile, key = dst
        tile[key] = nisa.activation(op=nl.copy, data=src, scale=column, dtype=tile.dtype)

    def scale_silu(self, dst: Any, src: Any, column: Any) -> None:
        """Compute ``dst = silu(src * column)`` on the scalar engine; ``column`` is float32 [partitions, 1]."""
        tile, key = dst
        tile[key] = nisa.activation(op=nl.silu, data=src, scale=column, dtype=tile.dtype)

    def scale_add(self, dst: Any, src: Any, column: Any, b: Any) -> None:
        """Compute ``dst = src * column + b`` on the vector engine; ``src`` or ``b`` is in SBUF."""
        tile, key = dst
        tile[key] = nisa.scalar_tensor_tensor(
            data=src, op0=nl.multiply, operand0=column, op1=nl.add, operand1=b, dtype=tile.dtype
        )

    def scale_multiply(self, dst: Any, src: Any, column: Any, b: Any) -> None:
        """Compute ``dst = src * column * b`` on the vector engine; ``src`` or ``b`` is in SBUF."""
        tile, key = dst
        tile[key] = nisa.scalar_tensor_tensor(
            data=src, op0=nl.multiply, operand0=column, op1=nl.multiply, operand1=b, dtype=tile.dtype
        )

    def scale_add_column(self, dst: Any, src: Any, column: Any, bias: Any) -> None:
        """Compute ``dst = src * column + bias`` on the vector engine; both are float32 [partitions, 1]."""
        tile, key = dst
        tile[key] = nisa.tensor_scalar(src, nl.multiply, column, op1=nl.add, operand1=bias, dtype=tile.dtype)

    def fill(self, tile: Any, value: float) -> None:
        """Set every element of a tile to ``value``."""
        tile[...] = nisa.memset(tile.shape, value=value, dtype=tile.dtype)

    def loop(self, count: int) -> Any:
        """Iterate without dependences between iterations; the index is a symbol that can only address tiles."""
        return nl.affine_range(count)

    def static_range(self, count: int) -> Any:
        """Unroll the loop; the index is a number. (Python's ``range`` would become ``nl.sequential_range``.)"""
        return nl.static_range(count)
