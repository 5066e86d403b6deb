"""Results as new tiles: what the operators of the language and the instructions of the first dialect return.

An instruction writes its result into a new tile (:func:`new_result`). If the kernel assigns that tile to a declared one
(``tile[...] = result``, ``psum += result``), the instruction is redirected: it writes the declared tile instead, and no
copy is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from neuronmm.emulator.nki.dtypes import BOOL, as_dtype, dtype_name, promoted
from neuronmm.emulator.nki.engines import (
    check_matmul_result,
    elementwise,
    memset,
    register_matmul,
    register_writer,
)
from neuronmm.emulator.nki.machine import Machine, current
from neuronmm.emulator.nki.operands import bounding_region, check_distinct_elements, check_operand
from neuronmm.emulator.nki.ops import OPS, Op
from neuronmm.emulator.nki.tile import Mask, Tile, declare
from neuronmm.emulator.nki.trace import Engine, Space
from neuronmm.emulator.nki.type_rules import matmul_results


def new_result(shape: tuple[int, ...], dtype: Any, space: Space = Space.SBUF, mask: Mask = None) -> Tile:
    """Allocate a tile for the result of the next instruction."""
    tile = declare(shape, as_dtype(dtype), space)
    tile.producer, tile.mask = len(current().trace.instructions), mask
    return tile


def compute(op: Op, operands: Sequence[Any], dtype: Any = None, mask: Mask = None) -> Tile:
    """Run an operator of the language on tiles and numbers; the result is a new tile in SBUF.

    Its dtype is ``dtype``, else bool for comparisons and logic, else the promoted dtype of the operands.

    Raises:
        NkiError: no operand is a tile, or an operand breaks a rule of the engine.
    """
    tiles = [t for t in operands if isinstance(t, Tile)]
    if not tiles:
        current().fail("operand", f"nl.{op.name} needs a tile")
    axes = max(tile.ndim for tile in tiles)
    try:
        shape = np.broadcast_shapes(*(t.shape + (1,) * (axes - t.ndim) for t in tiles))
    except ValueError:
        message = f"the operands of nl.{op.name} differ in shape and do not broadcast"
        current().fail("shape", message, tiles[0].shape, tiles[-1].shape)
    default = BOOL if op.logical else promoted(*(o.dtype if isinstance(o, Tile) else o for o in operands))
    result = new_result(shape if len(shape) > 1 else (*shape, 1), dtype or default, mask=mask)
    spread = [_repeat_partition(o, result.shape) for o in operands]
    elementwise(op.engine, op.name, result, spread, op.function, mask)
    return result


def _repeat_partition(operand: Any, shape: tuple[int, ...]) -> Any:
    """Repeat a tile of one partition over those of ``shape``; the SDK's compiler chooses the instructions for it."""
    if isinstance(operand, Tile) and operand.shape[0] == 1 < shape[0]:
        return operand.broadcast_to((shape[0], *operand.shape[1:]))
    return operand


@dataclass(frozen=True)
class LoopReduction:
    """The value of ``nl.loop_reduce``: its assignment to a tile is ``tile = op(tile, value)`` in each iteration."""

    value: Tile
    op: Op
    mask: Mask = None


def assign(dst: Tile, value: Any) -> None:
    """``tile[...] = value``: redirect the last instruction if it produced ``value``, else copy on the vector engine."""
    machine = current()
    if isinstance(value, LoopReduction):
        op = value.op
        return elementwise(
            op.engine, op.name, dst, (dst, value.value), op.function, value.mask, accumulating=True
        )  # fmt: skip
    if not isinstance(value, Tile):
        return memset(dst, value)
    same_view = (value.offset, value.shape, value.strides) == (dst.offset, dst.shape, dst.strides)
    if value.storage is dst.storage and same_view:
        return None  # Python's second step of ``tile[...] += x``, which has already written the tile
    producer = machine.trace.instructions[value.producer] if value.producer >= 0 else None
    if producer is not None and producer.engine is Engine.TENSOR and dst.space is not Space.PSUM:
        if producer.op != "transpose":  # the compiler makes two instructions of a transpose that is assigned to SBUF
            machine.fail("operand space", "the tensor engine writes only PSUM", "psum", dst.space.value)
        producer = None
    moves_bits = producer is not None and (producer.engine, producer.op) == (Engine.VECTOR, "transpose")
    if moves_bits and dst.dtype != value.dtype:
        producer = None  # it keeps the dtype; the compiler adds a cast
    if producer is None or value.producer != len(machine.trace.instructions) - 1:
        return elementwise(Engine.VECTOR, "copy", dst, (value,), OPS["copy"].function, value.mask)
    if producer.engine is Engine.DMA and dst.space is Space.PSUM:
        machine.fail("operand space", "the destination of a DMA must be in hbm or sbuf", "hbm or sbuf", "psum")
    _redirect(machine, dst, value, adds=False)
    return None


def accumulate(dst: Tile, value: Any) -> None:
    """``tile += value``: a matmul that was the last instruction accumulates in PSUM, else the vector engine adds."""
    machine = current()
    last = machine.trace.instructions[-1] if machine.trace.instructions else None
    is_last_result = isinstance(value, Tile) and value.producer == len(machine.trace.instructions) - 1
    if is_last_result and last is not None and last.engine is Engine.TENSOR and dst.space is Space.PSUM:
        _redirect(machine, dst, value, adds=True)
    else:
        elementwise(Engine.VECTOR, "add", dst, (dst, value), np.add, accumulating=True)


def _redirect(machine: Machine, dst: Tile, value: Tile, adds: bool) -> None:
    """Make the last instruction, whose result is ``value``, write ``dst`` instead."""
    machine.check_scope(value.storage)
    last = machine.trace.instructions[-1]
    is_tensor = last.engine is Engine.TENSOR
    if last.engine is Engine.DMA:
        if dst.space is not Space.SBUF:
            machine.fail("operand space", "a load writes SBUF; store from there", "sbuf", dst.space.value)
        machine.check_scope(dst.storage)
        dst.check_bounds(value.mask)
        written = bounding_region(dst)
    else:
        on_chip = (Space.SBUF,) if last.engine is Engine.GPSIMD else (Space.SBUF, Space.PSUM)
        spaces = (Space.PSUM,) if is_tensor else on_chip
        written = check_operand(machine, dst, f"the result of {last.op}", spaces)
    if (dst.shape[0], dst.size) != (value.shape[0], value.size):
        machine.fail("result shape", "the assigned result has another shape", dst.shape, value.shape)
    if is_tensor:
        dtypes = matmul_results(machine.core) if last.op == "matmul" else (value.dtype,)
        check_matmul_result(machine, dst, written, dtypes)
        last.accumulate = register_matmul(machine, dst, written, adds)
    else:
        check_distinct_elements(machine, dst)
        register_writer(dst, written, last.engine)
    last.writes, last.dtype = (written,), last.dtype if is_tensor else dtype_name(dst.dtype)
    machine.trace.buffers[dst.storage.record.id].released = len(machine.trace.instructions)
    value.storage.assigned = True
    if machine.trace.buffers[-1] is value.storage.record:
        machine.trace.buffers.pop()
    else:
        value.storage.record.released = value.storage.record.allocated
    if machine.has_data:
        content = value.read()
        if last.accumulate:
            content = content + dst.read(accumulating=True).reshape(content.shape)
        dst.write(content.reshape(dst.shape), value.mask, adds)
