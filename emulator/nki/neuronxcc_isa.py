"""``neuronxcc.nki.isa``, first part: matmul, transposes, elementwise instructions, reductions, copies and DMA.

Most instructions return their result as a new tile (:mod:`.results` says what its assignment does). Keyword arguments
and their order are those of the SDK's documentation (2.26). An instruction raises NkiError at the kernel's line if an
operand breaks a rule; hints to the compiler (``dge_mode``, ``is_stationary_onezero``, ...) are accepted and ignored.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from neuronmm.emulator.nki import engines, instructions
from neuronmm.emulator.nki.dtypes import FLOAT32, promoted
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.ops import as_op
from neuronmm.emulator.nki.results import new_result
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
    """The engines by their names in the SDK."""

    tensor, vector, scalar, gpsimd, unknown = Engine.TENSOR, Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD, None


class dge_mode(IntEnum):
    """The generator of the descriptors of a DMA."""

    none, swdge, hwdge, unknown = 0, 1, 2, 3


class reduce_cmd(IntEnum):
    """What an instruction does with the accumulators of its engine when it also reduces."""

    idle, reset, reduce, reset_reduce = 0, 1, 2, 3


def reduction_target(command: Any, reduce_res: Tile | None) -> Tile | None:
    """Return the tile that receives a reduction.

    Raises:
        NkiError: ``command`` needs accumulators that survive the instruction, which are not emulated.
    """
    supported = reduce_cmd.idle if reduce_res is None else reduce_cmd.reset_reduce
    if (reduce_cmd.idle if command is None else command) != supported:
        current().fail(
            "unsupported", "the emulator keeps no accumulators between instructions: reduce into reduce_res at once",
            f"reduce_cmd {supported.name}", str(command),
        )  # fmt: skip
    return reduce_res


def as_last_result(result: Tile) -> Tile:
    """Mark ``result`` as produced by the last instruction; an instruction that also reduces records two."""
    result.producer = len(current().trace.instructions) - 1
    return result


class nc_version(IntEnum):
    """The generations of the NeuronCore, in order."""

    gen2, gen3, gen4 = 2, 3, 4


def get_nc_version() -> nc_version:
    """Return the generation that the kernel runs on."""
    return nc_version(int(current().core.name.removeprefix("v")))


def nc_matmul(
    stationary: Tile, moving: Tile, *, is_stationary_onezero: bool = False, is_moving_onezero: bool = False,
    is_transpose: bool = False, tile_position: tuple[int, ...] = (), tile_size: tuple[int, ...] = (), mask: Any = None,
) -> Tile:  # fmt: skip
    """Return ``stationary^T moving`` as a new PSUM tile [M, N]; ``psum += nc_matmul(...)`` accumulates.

    ``is_transpose``: ``moving`` is an identity. ``tile_position`` and ``tile_size`` place the matmul on a part of the
    engine, beside others; they are checked, and affect only the time, which is not modelled.
    """
    _refuse_mask(mask)
    if tile_position or tile_size:
        _check_tile_position(stationary, tuple(number(n) for n in tile_position), tile_size)
    dtype = engines.transpose_dtype(current().core, stationary.dtype) if is_transpose else FLOAT32
    result = new_result((stationary.elements, *moving.shape[1:]), dtype, Space.PSUM)
    if is_transpose:
        instructions.check_identity(moving)
    engines.matmul(result, stationary, moving, accumulate=False, transpose=is_transpose)
    return result


def _check_tile_position(stationary: Tile, position: tuple[int, ...], size: tuple[int, ...]) -> None:
    machine, needed = current(), (stationary.shape[0], stationary.elements)
    if len(position) != 2 or len(size) != 2 or any(n % 32 for n in (*position, *size)):
        machine.fail("tile", "tile_position and tile_size must both be pairs of multiples of 32", 32, (position, size))
    if any(s < n for s, n in zip(size, needed, strict=True)):
        machine.fail("tile", "the stationary operand is larger than tile_size", size, needed)
    if any(p + s > 128 for p, s in zip(position, size, strict=True)):
        machine.fail("tile", "the tile leaves the 128 x 128 engine", 128, (position, size))
    if machine.core.name == "v2" and 32 in size:
        machine.fail("tile", "on NeuronCore-v2 the sides of tile_size must be 64 or 128", 64, size)


def nc_transpose(data: Tile, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> Tile:
    """Return ``data^T`` as a new tile; another ``dtype`` than the engine writes takes a copy."""
    _refuse_mask(mask)
    return instructions.new_transpose(data, dtype, engine)


def activation(
    op: Any, data: Tile, *, bias: Any = None, scale: Any = 1.0, reduce_op: Any = None, reduce_res: Tile | None = None,
    reduce_cmd: Any = None, mask: Any = None, dtype: Any = None,
) -> Tile:  # fmt: skip
    """Return ``op(data * scale + bias)``, on the scalar engine; ``reduce_res`` receives the sum over the free axes."""
    result = new_result(data.shape, dtype or data.dtype, mask=mask)
    instructions.activation(result, op, data, bias, scale, mask, reduction_target(reduce_cmd, reduce_res), reduce_op)
    return as_last_result(result)


def activation_reduce(
    op: Any, data: Tile, *, reduce_op: Any, reduce_res: Tile, bias: Any = None, scale: Any = 1.0, mask: Any = None,
    dtype: Any = None,
) -> Tile:  # fmt: skip
    """Like :func:`activation`; always sums the result over the free axes into ``reduce_res``."""
    result = new_result(data.shape, dtype or data.dtype, mask=mask)
    instructions.activation(result, op, data, bias, scale, mask, reduce_res, reduce_op)
    return as_last_result(result)


def tensor_reduce(
    op: Any, data: Tile, axis: Any, *, mask: Any = None, dtype: Any = None, negate: bool = False, keepdims: bool = False
) -> Tile:
    """Return ``data`` reduced over its last free axes with add, maximum, minimum or multiply."""
    instructions.check_last_axes(data, axis)
    result = reduction_result(data, axis, keepdims, dtype, mask)
    instructions.reduce(result, op, data, axis, mask, negate=negate)
    return result


def tensor_tensor(
    data1: Tile, data2: Tile, op: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None
) -> Tile:
    """Return ``data1 op data2``."""
    result = new_result(data1.shape, dtype or promoted(data1.dtype, data2.dtype), mask=mask)
    instructions.tensor_tensor(result, data1, data2, op, engine or Engine.VECTOR, mask)
    return result


def tensor_scalar(
    data: Tile, op0: Any, operand0: Any, reverse0: bool = False, op1: Any = None, operand1: Any = None,
    reverse1: bool = False, *, dtype: Any = None, mask: Any = None, engine: Any = None,
) -> Tile:  # fmt: skip
    """Return ``(data op0 operand0) op1 operand1`` with per-partition operands."""
    result = new_result(data.shape, dtype or data.dtype, mask=mask)
    needs_gpsimd = any(op is not None and as_op(op).engine is Engine.GPSIMD for op in (op0, op1))
    engine = Engine.GPSIMD if needs_gpsimd else engine or Engine.VECTOR
    instructions.tensor_scalar(result, data, op0, operand0, reverse0, op1, operand1, reverse1, engine, mask)
    return result


def tensor_tensor_scan(
    data0: Tile, data1: Tile, initial: Any, op0: Any, op1: Any, reverse0: bool = False, reverse1: bool = False, *,
    dtype: Any = None, mask: Any = None,
) -> Tile:  # fmt: skip
    """Return the scan ``r[t] = (data0[t] op0 r[t-1]) op1 data1[t]``; the flags swap an operator's operands."""
    result = new_result(data0.shape, dtype or promoted(data0.dtype, data1.dtype), mask=mask)
    instructions.scan(result, data0, data1, initial, op0, op1, reverse0, reverse1, mask)
    return result


def tensor_copy(src: Tile, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> Tile:
    """Return a copy of ``src`` in SBUF."""
    result = new_result(src.shape, dtype or src.dtype, mask=mask)
    instructions.copy(result, src, engine or Engine.VECTOR, mask)
    return result


def reciprocal(data: Tile, *, dtype: Any = None, mask: Any = None) -> Tile:
    """Return ``1 / data``, on the vector engine."""
    result = new_result(data.shape, dtype or data.dtype, mask=mask)
    engines.elementwise(Engine.VECTOR, "reciprocal", result, (data,), np.reciprocal, mask)
    return result


def memset(shape: Any, value: float, dtype: Any, *, mask: Any = None, engine: Any = None) -> Tile:
    """Return a new SBUF tile filled with ``value``."""
    result = new_result(tuple(shape), dtype, mask=mask)
    engines.memset(result, value, engine or Engine.VECTOR, mask)
    return result


def dma_copy(*, dst: Tile, src: Tile, mask: Any = None, dge_mode: Any = None) -> None:
    """Move ``src`` to ``dst`` between HBM and SBUF."""
    engines.dma(dst, src, mask)


_DMA_TRANSPOSES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
"""Number of axes -> the order of axes that a transposing DMA produces."""


def dma_transposed_view(src: Tile, axes: Any = None) -> Tile:
    """Return the view of ``src`` that a transposing DMA moves.

    Raises:
        NkiError: a DMA has no transpose to the order ``axes``, or none of a tensor with this number of axes.
    """
    order = _DMA_TRANSPOSES.get(src.ndim)
    if order is None or (axes is not None and tuple(axes) != order):
        current().fail(
            "transposition",
            f"a DMA cannot transpose {src.shape} to this order of axes",
            list(_DMA_TRANSPOSES.values()),
            axes,
        )
    src.check_bounds(None)
    return src.permute(order)


def dma_transpose(src: Tile, *, axes: Any = None, mask: Any = None, dtype: Any = None, dge_mode: Any = None) -> Tile:
    """Return a new SBUF tile with the 2 to 4 axes of ``src`` (HBM or SBUF) reversed; of 4, the middle two stay."""
    if mask is not None:
        current().fail("unsupported", "the emulator does not mask a transposing DMA: slice the source")
    view = dma_transposed_view(src, axes)
    result = new_result(view.shape, dtype or src.dtype)
    engines.dma(result, view)
    return result


def _refuse_mask(mask: Any) -> None:
    if mask is not None:
        current().fail("unsupported", "the emulator does not mask tensor-engine instructions: slice the operands")


def reduction_result(data: Tile, axis: Any, keepdims: bool, dtype: Any, mask: Any) -> Tile:
    """Allocate the result of a reduction of ``data`` over free axes; ``mask`` has the axes of ``data``."""
    axes = instructions.free_axes(data, axis)
    sizes = [1 if i in axes else n for i, n in enumerate(data.shape) if keepdims or i not in axes]
    shape = tuple(sizes) if len(sizes) > 1 else (*sizes, 1)
    return new_result(shape, dtype or data.dtype, mask=instructions.reduction_mask(data, axis, mask, shape))
