"""``neuronxcc.nki.isa``: instructions return a new tile; assigning it to a declared tile makes it write there."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from neuronmm.emulator.nki import engines, instructions
from neuronmm.emulator.nki.dtypes import FLOAT32, promoted
from neuronmm.emulator.nki.engines import fresh
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.ops import as_op
from neuronmm.emulator.nki.symbol import number
from neuronmm.emulator.nki.tile import Tile
from neuronmm.emulator.nki.trace import Engine, Space

__all__ = [
    "activation",
    "activation_reduce",
    "dge_mode",
    "dma_copy",
    "dma_transpose",
    "engine",
    "get_nc_version",
    "gpsimd_engine",
    "memset",
    "nc_matmul",
    "nc_transpose",
    "nc_version",
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

tensor_engine, vector_engine = Engine.TENSOR, Engine.VECTOR
scalar_engine, gpsimd_engine, unknown_engine = Engine.SCALAR, Engine.GPSIMD, None


class engine:
    """The engines by the names the SDK gives them."""

    tensor, vector, scalar, gpsimd, unknown = Engine.TENSOR, Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD, None


class dge_mode(IntEnum):
    """Who generates the descriptors of a DMA."""

    none, swdge, hwdge, unknown = 0, 1, 2, 3


class reduce_cmd(IntEnum):
    """What an instruction does with its engine's accumulators before it leaves its reduction there."""

    idle, reset, reduce, reset_reduce = 0, 1, 2, 3


def reads_out(command: Any, reduced: Tile | None) -> Tile | None:
    """The tile that receives a reduction; refuse what needs accumulators that outlive an instruction."""
    wanted = reduce_cmd.idle if reduced is None else reduce_cmd.reset_reduce
    if (reduce_cmd.idle if command is None else command) != wanted:
        current().fail(
            "unsupported", "the emulator keeps no accumulators between instructions: reduce into reduce_res at once",
            f"reduce_cmd {wanted.name}", str(command),
        )  # fmt: skip
    return reduced


def last(result: Tile) -> Tile:
    """``result`` as that of the last instruction, which one that also reduces leaves behind its reduction."""
    result.result = len(current().trace.instructions) - 1
    return result


class nc_version(IntEnum):
    """The generations of the NeuronCore, in their order."""

    gen2, gen3, gen4 = 2, 3, 4


def get_nc_version() -> nc_version:
    """The generation the kernel runs on."""
    return nc_version(int(current().core.name.removeprefix("v")))


def nc_matmul(
    stationary: Tile, moving: Tile, *, is_stationary_onezero: bool = False, is_moving_onezero: bool = False,
    is_transpose: bool = False, tile_position: tuple[int, ...] = (), tile_size: tuple[int, ...] = (), mask: Any = None,
) -> Tile:  # fmt: skip
    """``stationary^T moving`` as a new PSUM tile; ``psum += nc_matmul(...)`` accumulates.

    ``is_transpose`` says that ``moving`` is an identity. ``tile_position`` and ``tile_size`` place the product on a
    part of the engine, beside others: that, and what the other flags hint at, changes its time only.
    """
    _unmasked(mask)
    if tile_position or tile_size:
        _check_part(stationary, tuple(number(n) for n in tile_position), tile_size)
    dtype = engines.transposed(current().core, stationary.dtype) if is_transpose else FLOAT32
    result = fresh((stationary.elements, *moving.shape[1:]), dtype, Space.PSUM)
    if is_transpose:
        instructions.check_identity(moving)
    engines.matmul(result, stationary, moving, accumulate=False, transpose=is_transpose)
    return result


def _check_part(stationary: Tile, position: tuple[int, ...], size: tuple[int, ...]) -> None:
    machine, needed = current(), (stationary.shape[0], stationary.elements)
    if len(position) != 2 or len(size) != 2 or any(n % 32 for n in (*position, *size)):
        machine.fail("tile", "tile_position and tile_size are both pairs of multiples of 32", 32, (position, size))
    if any(s < n for s, n in zip(size, needed, strict=True)):
        machine.fail("tile", "the stationary operand is larger than tile_size", size, needed)
    if any(p + s > 128 for p, s in zip(position, size, strict=True)):
        machine.fail("tile", "the tile leaves the 128 x 128 engine", 128, (position, size))
    if machine.core.name == "v2" and 32 in size:
        machine.fail("tile", "a side of tile_size is 32 on NeuronCore-v2", 64, size)


def nc_transpose(data: Tile, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> Tile:
    """``data^T`` as a new PSUM tile (tensor engine); another ``dtype`` than the engine writes takes one more copy."""
    _unmasked(mask)
    return instructions.transposition(data, dtype)


def activation(
    op: Any, data: Tile, *, bias: Any = None, scale: Any = 1.0, reduce_op: Any = None, reduce_res: Tile | None = None,
    reduce_cmd: Any = None, mask: Any = None, dtype: Any = None,
) -> Tile:  # fmt: skip
    """``op(data * scale + bias)`` on the scalar engine; ``reduce_res`` receives its sum over the free axes."""
    result = fresh(data.shape, dtype or data.dtype, mask=mask)
    instructions.activation(result, op, data, bias, scale, mask, reads_out(reduce_cmd, reduce_res), reduce_op)
    return last(result)


def activation_reduce(
    op: Any, data: Tile, *, reduce_op: Any, reduce_res: Tile, bias: Any = None, scale: Any = 1.0, mask: Any = None,
    dtype: Any = None,
) -> Tile:  # fmt: skip
    """:func:`activation` that also sums its result over the free axes into ``reduce_res``."""
    result = fresh(data.shape, dtype or data.dtype, mask=mask)
    instructions.activation(result, op, data, bias, scale, mask, reduce_res, reduce_op)
    return last(result)


def tensor_reduce(
    op: Any, data: Tile, axis: Any, *, mask: Any = None, dtype: Any = None, negate: bool = False, keepdims: bool = False
) -> Tile:
    """Reduce free axes of ``data``."""
    result = reduction_result(data, axis, keepdims, dtype, mask)
    instructions.reduce(result, op, data, axis, mask, negate=negate)
    return result


def tensor_tensor(
    data1: Tile, data2: Tile, op: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None
) -> Tile:
    """``data1 op data2``."""
    result = fresh(data1.shape, dtype or promoted(data1.dtype, data2.dtype), mask=mask)
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
    data0: Tile, data1: Tile, initial: Any, op0: Any, op1: Any, reverse0: bool = False, reverse1: bool = False, *,
    dtype: Any = None, mask: Any = None,
) -> Tile:  # fmt: skip
    """The recurrence ``r[t] = (data0[t] op0 r[t-1]) op1 data1[t]``; ``reverse0`` and ``reverse1`` swap the operands."""
    result = fresh(data0.shape, dtype or promoted(data0.dtype, data1.dtype), mask=mask)
    instructions.scan(result, data0, data1, initial, op0, op1, reverse0, reverse1, mask)
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


def dma_copy(*, dst: Tile, src: Tile, mask: Any = None, dge_mode: Any = None) -> None:
    """Move ``src`` to ``dst`` between HBM and SBUF; ``dge_mode``, who makes the descriptors, is a matter of time."""
    engines.dma(dst, src, mask)


_TRANSPOSITIONS = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
"""Number of axes -> the order of axes that a transposing DMA gives."""


def reordered(src: Tile, axes: Any = None) -> Tile:
    """The view of ``src`` that a transposing DMA moves."""
    order = _TRANSPOSITIONS.get(src.ndim)
    if order is None or (axes is not None and tuple(axes) != order):
        current().fail(
            "transposition", f"a DMA does not transpose {src.shape} so", list(_TRANSPOSITIONS.values()), axes
        )
    src.inside(None)
    return src.permuted(order)


def dma_transpose(src: Tile, *, axes: Any = None, mask: Any = None, dtype: Any = None, dge_mode: Any = None) -> Tile:
    """A new SBUF tile with the axes of ``src`` (2 to 4, in HBM or SBUF) in reverse; of 4, the middle two stay."""
    if mask is not None:
        current().fail("unsupported", "the emulator does not mask a transposing DMA: slice the source")
    view = reordered(src, axes)
    result = fresh(view.shape, dtype or src.dtype)
    engines.dma(result, view)
    return result


def _unmasked(mask: Any) -> None:
    if mask is not None:
        current().fail("unsupported", "the emulator does not mask tensor-engine instructions: slice the operands")


def reduction_result(data: Tile, axis: Any, keepdims: bool, dtype: Any, mask: Any) -> Tile:
    """The new tile for a reduction of ``data`` over free axes; ``mask`` has the axes of ``data``."""
    axes = instructions.free_axes(data, axis)
    kept = [1 if i in axes else n for i, n in enumerate(data.shape) if keepdims or i not in axes]
    shape = tuple(kept) if len(kept) > 1 else (*kept, 1)
    return fresh(shape, dtype or data.dtype, mask=instructions.reduced_mask(data, axis, mask, shape))
