"""``neuronxcc.nki.isa``: instructions return a new tile; assigning it to a declared tile makes it write there."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from neuronmm.emulator.nki import engines, instructions
from neuronmm.emulator.nki.dtypes import FLOAT32
from neuronmm.emulator.nki.engines import fresh
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.ops import as_op
from neuronmm.emulator.nki.tile import Tile
from neuronmm.emulator.nki.trace import Engine, Space

__all__ = [
    "activation",
    "activation_reduce",
    "dma_copy",
    "engine",
    "get_nc_version",
    "gpsimd_engine",
    "memset",
    "nc_matmul",
    "nc_transpose",
    "nc_version",
    "reciprocal",
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

tensor_engine, vector_engine = Engine.TENSOR, Engine.VECTOR
scalar_engine, gpsimd_engine, unknown_engine = Engine.SCALAR, Engine.GPSIMD, None


class engine:
    """The engines by the names the SDK gives them."""

    tensor, vector, scalar, gpsimd, unknown = Engine.TENSOR, Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD, None


class nc_version(Enum):
    """The generations of the NeuronCore, in their order."""

    gen2, gen3, gen4 = 2, 3, 4


def get_nc_version() -> nc_version:
    """The generation the kernel runs on."""
    return nc_version(int(current().core.name.removeprefix("v")))


def nc_matmul(
    stationary: Tile, moving: Tile, *, is_moving_onezero: bool = False, is_transpose: bool = False, mask: Any = None
) -> Tile:
    """``stationary^T moving`` as a new PSUM tile; ``psum += nc_matmul(...)`` accumulates.

    ``is_transpose`` says that ``moving`` is an identity. ``is_moving_onezero`` is a hint about time.
    """
    _unmasked(mask)
    dtype = engines.transposed(current().core, stationary.dtype) if is_transpose else FLOAT32
    result = fresh((stationary.elements, *moving.shape[1:]), dtype, Space.PSUM)
    if is_transpose:
        instructions.check_identity(moving)
    engines.matmul(result, stationary, moving, accumulate=False, transpose=is_transpose)
    return result


def nc_transpose(data: Tile, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> Tile:
    """``data^T`` as a new PSUM tile (tensor engine); another ``dtype`` than the engine writes takes one more copy."""
    _unmasked(mask)
    return instructions.transposition(data, dtype)


def activation(
    op: Any, data: Tile, *, bias: Any = None, scale: Any = 1.0, reduce_op: Any = None, reduce_res: Tile | None = None,
    mask: Any = None, dtype: Any = None,
) -> Tile:  # fmt: skip
    """``op(data * scale + bias)`` on the scalar engine."""
    result = fresh(data.shape, dtype or data.dtype, mask=mask)
    instructions.activation(result, op, data, bias, scale, mask, reduce_res)
    return result


def activation_reduce(
    op: Any, data: Tile, *, reduce_op: Any, reduce_res: Tile, bias: Any = None, scale: Any = 1.0, dtype: Any = None
) -> Tile:
    """:func:`activation` that also sums its result over the free axes into ``reduce_res``."""
    return activation(op, data, bias=bias, scale=scale, dtype=dtype, reduce_op=reduce_op, reduce_res=reduce_res)


def tensor_reduce(
    op: Any, data: Tile, axis: Any, *, mask: Any = None, dtype: Any = None, negate: bool = False, keepdims: bool = False
) -> Tile:
    """Reduce free axes of ``data``."""
    result = fresh(reduced_shape(data, axis, keepdims), dtype or data.dtype, mask=mask)
    instructions.reduce(result, op, data, axis, mask, negate=negate)
    return result


def tensor_tensor(
    data1: Tile, data2: Tile, op: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None
) -> Tile:
    """``data1 op data2``."""
    result = fresh(data1.shape, dtype or data1.dtype, mask=mask)
    instructions.tensors(result, data1, data2, op, engine or Engine.VECTOR, mask)
    return result


def tensor_scalar(
    data: Tile, op0: Any, operand0: Any, reverse0: bool = False, op1: Any = None, operand1: Any = None,
    reverse1: bool = False, *, dtype: Any = None, mask: Any = None, engine: Any = None,
) -> Tile:  # fmt: skip
    """``(data op0 operand0) op1 operand1`` with per-partition operands."""
    result = fresh(data.shape, dtype or data.dtype, mask=mask)
    power = any(op is not None and as_op(op).engine is Engine.GPSIMD for op in (op0, op1))
    where = Engine.GPSIMD if power else engine or Engine.VECTOR
    instructions.scalar_ops(result, data, op0, operand0, reverse0, op1, operand1, reverse1, where, mask)
    return result


def tensor_tensor_scan(
    data0: Tile, data1: Tile, initial: Any, op0: Any, op1: Any, *, dtype: Any = None, mask: Any = None
) -> Tile:
    """The recurrence ``r[t] = (r[t-1] op0 data0[t]) op1 data1[t]``."""
    result = fresh(data0.shape, dtype or data0.dtype, mask=mask)
    instructions.scan(result, data0, data1, initial, op0, op1, mask)
    return result


def tensor_copy(src: Tile, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> Tile:
    """A copy of ``src`` in SBUF."""
    result = fresh(src.shape, dtype or src.dtype, mask=mask)
    instructions.copy(result, src, engine or Engine.VECTOR, mask)
    return result


def reciprocal(data: Tile, *, dtype: Any = None, mask: Any = None) -> Tile:
    """``1 / data`` on the vector engine."""
    result = fresh(data.shape, dtype or data.dtype, mask=mask)
    engines.elementwise(Engine.VECTOR, "reciprocal", result, (data,), np.reciprocal, mask)
    return result


def memset(shape: Any, value: float, dtype: Any, *, mask: Any = None, engine: Any = None) -> Tile:
    """A new SBUF tile filled with ``value``."""
    result = fresh(tuple(shape), dtype, mask=mask)
    engines.memset(result, value, engine or Engine.VECTOR, mask)
    return result


def dma_copy(*, dst: Tile, src: Tile, mask: Any = None) -> None:
    """Move ``src`` to ``dst`` between HBM and SBUF."""
    engines.dma(dst, src, mask)


def _unmasked(mask: Any) -> None:
    if mask is not None:
        current().fail("unsupported", "the emulator does not mask tensor-engine instructions: slice the operands")


def reduced_shape(data: Tile, axis: Any, keepdims: bool) -> tuple[int, ...]:
    """The shape a reduction of ``data`` over free axes leaves."""
    axes = {a % data.ndim for a in (axis if isinstance(axis, (tuple, list)) else (axis,))}
    kept = [1 if i in axes else n for i, n in enumerate(data.shape) if keepdims or i not in axes]
    return tuple(kept) if len(kept) > 1 else (*kept, 1)
