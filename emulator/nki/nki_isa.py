"""``nki.isa`` (0.3 and later): every instruction takes its destination first and returns nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuronmm.emulator.nki import engines, instructions
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.neuronxcc_isa import (
    engine,
    gpsimd_engine,
    reads_out,
    reduce_cmd,
    scalar_engine,
    tensor_engine,
    unknown_engine,
    vector_engine,
)
from neuronmm.emulator.nki.tile import Tile
from neuronmm.emulator.nki.trace import Engine

__all__ = [
    "activation",
    "activation_reduce",
    "dma_copy",
    "engine",
    "gpsimd_engine",
    "memset",
    "nc_matmul",
    "nc_transpose",
    "reciprocal",
    "reduce_cmd",
    "scalar_engine",
    "tensor_copy",
    "tensor_engine",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_tensor",
    "tensor_tensor_scan",
    "unknown_engine",
    "vector_engine",
]


def nc_matmul(
    dst: Tile, stationary: Tile, moving: Tile, accumulate: bool | None = None, name: str | None = None
) -> None:
    """``dst = stationary^T moving``; None: the first product into a location overwrites, later ones add."""
    engines.matmul(dst, stationary, moving, accumulate)


def nc_transpose(dst: Tile, data: Tile, engine: Any = None, name: str | None = None) -> None:
    """``dst = data^T`` on the tensor engine."""
    instructions.transpose(dst, data)


def activation(
    dst: Tile, op: Any, data: Tile, bias: Any = None, scale: Any = 1.0, reduce_op: Any = None,
    reduce_res: Tile | None = None, reduce_cmd: Any = None, name: str | None = None,
) -> None:  # fmt: skip
    """``dst = op(data * scale + bias)`` on the scalar engine; ``reduce_res`` receives its sum over the free axes."""
    instructions.activation(dst, op, data, bias, scale, None, reads_out(reduce_cmd, reduce_res), reduce_op)


def activation_reduce(
    dst: Tile, op: Any, data: Tile, reduce_op: Any, reduce_res: Tile, bias: Any = None, scale: Any = 1.0,
    name: str | None = None,
) -> None:  # fmt: skip
    """:func:`activation` that also sums its result over the free axes into ``reduce_res``."""
    instructions.activation(dst, op, data, bias, scale, None, reduce_res, reduce_op)


def tensor_reduce(
    dst: Tile, op: Any, data: Tile, axis: Any, negate: bool = False, keepdims: bool = False, name: str | None = None
) -> None:
    """Reduce free axes of ``data``."""
    instructions.reduce(dst, op, data, axis, negate=negate)


def tensor_tensor(dst: Tile, data1: Tile, data2: Tile, op: Any, engine: Any = None, name: str | None = None) -> None:
    """``dst = data1 op data2``."""
    instructions.tensors(dst, data1, data2, op, engine or Engine.VECTOR)


def tensor_scalar(
    dst: Tile, data: Tile, op0: Any, operand0: Any, reverse0: bool = False, op1: Any = None, operand1: Any = None,
    reverse1: bool = False, engine: Any = None, name: str | None = None,
) -> None:  # fmt: skip
    """``dst = (data op0 operand0) op1 operand1`` with per-partition operands, float32 in this dialect."""
    instructions.need_float32(operand0, "operand0 of tensor_scalar")
    instructions.need_float32(operand1, "operand1 of tensor_scalar")
    where = engine or Engine.VECTOR
    instructions.scalar_ops(dst, data, op0, operand0, reverse0, op1, operand1, reverse1, where)


def tensor_tensor_scan(
    dst: Tile, data0: Tile, data1: Tile, initial: Any, op0: Any, op1: Any, reverse0: bool = False,
    reverse1: bool = False, name: str | None = None,
) -> None:  # fmt: skip
    """The recurrence ``dst[t] = (data0[t] op0 dst[t-1]) op1 data1[t]``; the flags swap an operator's operands."""
    instructions.scan(dst, data0, data1, initial, op0, op1, reverse0, reverse1)


def tensor_copy(dst: Tile, src: Tile, engine: Any = None, name: str | None = None) -> None:
    """``dst = src`` within SBUF and PSUM."""
    if (dst.shape[0], dst.elements) != (src.shape[0], src.elements):
        current().fail("shape", "source and destination of tensor_copy differ in shape", dst.shape, src.shape)
    instructions.copy(dst, src, engine or Engine.VECTOR)


def reciprocal(dst: Tile, data: Tile, name: str | None = None) -> None:
    """``dst = 1 / data`` on the vector engine."""
    engines.elementwise(Engine.VECTOR, "reciprocal", dst, (data,), np.reciprocal)


def memset(dst: Tile, value: float, engine: Any = None, name: str | None = None) -> None:
    """Fill ``dst`` with ``value``."""
    engines.memset(dst, value, engine or Engine.VECTOR)


def dma_copy(dst: Tile, src: Tile, name: str | None = None) -> None:
    """Move ``src`` to ``dst`` between HBM and SBUF."""
    engines.dma(dst, src)
