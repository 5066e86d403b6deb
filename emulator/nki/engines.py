"""The instructions: operand rules, the record, and the arithmetic. Both dialects' ISA modules call these.

Every function writes into a destination tile. With data it computes in float32 and rounds once, into the
destination's dtype; without data it does the same checks and leaves the same record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from neuronmm.emulator.nki.access import check_access
from neuronmm.emulator.nki.dtypes import BOOL, FLOAT32, as_dtype, dtype_name, promoted
from neuronmm.emulator.nki.index import Affine
from neuronmm.emulator.nki.machine import Machine, current
from neuronmm.emulator.nki.ops import OPS, Op
from neuronmm.emulator.nki.symbol import LoopIndex
from neuronmm.emulator.nki.tile import Mask, Tile, declare
from neuronmm.emulator.nki.trace import Engine, Region, Space
from neuronmm.kernels.hardware import NeuronCore

_MOVES = frozenset(("copy", "nc_stream_shuffle", "tensor_copy_predicated"))
"""Instructions that move bits, not by way of float32, where the first source has the result's dtype."""


def _operand(machine: Machine, tile: Any, role: str, spaces: tuple[Space, ...], mask: Mask = None) -> Region:
    """Check one on-chip operand of a compute engine; return its region."""
    if not isinstance(tile, Tile):
        machine.fail("operand", f"{role} must be a tile, not {type(tile).__name__}")
    if tile.space not in spaces:
        allowed = " or ".join(s.value for s in spaces)
        machine.fail("operand space", f"{role} must be in {allowed}", allowed, tile.space.value)
    machine.check_scope(tile.storage)
    if tile.beyond is not None:
        tile.inside(mask)
        region = Region(
            tile.storage.record.id, 0, tile.storage.record.partitions, 0, tile.storage.record.bytes_per_partition
        )
    else:
        region = tile.region()
    check_access(machine, tile, region, role)
    return region


def _no_overlap(machine: Machine, dst: Tile, mask: Mask = None) -> None:
    """Refuse a destination that names an element twice."""
    if dst.names_an_element_twice(mask):
        machine.fail("overlapping write", f"the destination view {dst.shape} names an element twice")


def _no_hazard(machine: Machine, dst: Tile, written: Region, src: Any, read: Region) -> None:
    """Refuse a destination that overlaps a source without being exactly it."""
    if not written.overlaps(read) or (dst.offset, dst.shape, dst.strides) == (src.offset, src.shape, src.strides):
        return
    to, of = (Affine(t.shape, t.strides, t.offset).values() for t in (dst, src))
    if np.intersect1d(to, of).size:
        machine.fail("overlapping write", "the destination overlaps a source and is not the same view")


def matmul(dst: Tile, stationary: Tile, moving: Tile, accumulate: bool | None, transpose: bool = False) -> None:
    """``dst (+)= stationary^T moving`` on the tensor engine.

    Dimensions: stationary [K <= 128, M <= 128] and moving [K, N <= 512] in SBUF, dst [M, N] in one PSUM bank.
    ``accumulate`` None: the first product into a PSUM location overwrites, later ones add. ``transpose``: moving is an
    identity, and dst has the dtype that :func:`transposed` gives.
    """
    machine = current()
    core = machine.core
    reads = (
        _operand(machine, moving, "moving", (Space.SBUF,)),
        _operand(machine, stationary, "stationary", (Space.SBUF,)),
    )
    written = _operand(machine, dst, "the result of a matrix product", (Space.PSUM,))
    (k, m), n = (stationary.shape[0], stationary.elements), moving.elements
    if moving.shape[0] != k:
        machine.fail("contraction", "stationary and moving differ in partitions", k, moving.shape[0])
    if m > core.stationary_columns:
        machine.fail("stationary size", "stationary has too many columns", core.stationary_columns, m)
    if n > core.moving_columns:
        machine.fail("moving size", "moving has too many columns", core.moving_columns, n)
    if (dst.shape[0], dst.elements) != (m, n):
        machine.fail(
            "result shape", "the result has another shape than the product", (m, n), (dst.shape[0], dst.elements)
        )
    if (stationary.dtype == FLOAT32) != (moving.dtype == FLOAT32):
        machine.fail("operand dtype", "float32 multiplies only float32", stationary.dtype.name, moving.dtype.name)
    _check_result(machine, dst, written, transposed(core, stationary.dtype) if transpose else FLOAT32)
    adds = _joins(machine, dst, written, accumulate)
    op = "transpose" if transpose else "matmul"
    machine.emit(
        Engine.TENSOR, op, reads, (written,), dtype=dtype_name(stationary.dtype), k=k, m=m, n=n, accumulate=adds
    )  # fmt: skip
    if machine.data:
        with np.errstate(invalid="ignore", over="ignore"):
            a = stationary.read().reshape(k, m).astype(np.float32)
            # from NeuronCore-v3 a transposition moves the elements; before, NaN and Inf spread over the products with 0
            moved = transpose and core.name != "v2"
            product = a.T if moved else a.T @ moving.read().reshape(k, n).astype(np.float32)
            product = product.reshape(dst.shape)
            total = dst.read(accumulating=True) + product if adds else product
        dst.write(total, accumulating=adds)


def transposed(core: NeuronCore, dtype: np.dtype) -> np.dtype:
    """The dtype in which the tensor engine writes a transposition of ``dtype`` to PSUM.

    NeuronCore-v2 multiplies with an identity, and every product leaves in float32; from v3 the transpose mode keeps the
    dtype. Source: the architecture guides of Trainium/Inferentia2 ("Data Types") and Trainium2 ("Built-in Transpose
    Support").
    """
    return FLOAT32 if core.name == "v2" else dtype


def _check_result(machine: Machine, dst: Tile, written: Region, dtype: np.dtype) -> None:
    """The rules for what the tensor engine writes to."""
    if dst.dtype != dtype:
        message = f"the tensor engine of NeuronCore-{machine.core.name} writes this result in another dtype"
        machine.fail("result dtype", message, dtype.name, dst.dtype.name)
    bank = machine.core.psum_bank_bytes
    if written.low // bank != (written.high - 1) // bank:
        machine.fail("psum bank", "the result crosses a PSUM bank", bank, written.high - written.low)
    _no_overlap(machine, dst)


def _joins(machine: Machine, dst: Tile, written: Region, accumulate: bool | None) -> bool:
    """Whether this product adds to what is there, and note who wrote the location."""
    groups = dst.storage.groups
    assert groups is not None
    key = written[1:]
    before = groups.get(key)
    if before is None:
        touching = [g for g in groups if written.overlaps(Region(written.buffer, *g))]
        if touching and accumulate is None:
            machine.fail(
                "accumulation group", "the product covers part of another product's location", touching[0], key
            )
        adds = bool(accumulate)
        if adds and not dst.storage.zeroed and not touching:
            machine.fail("accumulate", "the product accumulates on PSUM that no product wrote")
        before = groups[touching[0]] if touching else None
    else:
        adds = accumulate is not False
    if adds and before not in (None, Engine.TENSOR):
        machine.fail("accumulate", f"the product accumulates on PSUM that the {before.value} engine wrote")
    groups[key] = Engine.TENSOR
    return adds and (before is not None or not dst.storage.zeroed)


def _mark(dst: Tile, written: Region, engine: Engine) -> None:
    if dst.storage.groups is not None:
        dst.storage.groups[written[1:]] = engine


def _fit(values: np.ndarray, tile: Tile, shape: tuple[int, ...]) -> np.ndarray:
    """Bring a source's values to the destination's shape: same elements a partition, or one broadcast."""
    if values.shape == shape:
        return values
    if values.size == prod(shape):
        return values.reshape(shape)
    if values.ndim < len(shape):
        values = values.reshape(values.shape + (1,) * (len(shape) - values.ndim))
    return np.broadcast_to(values, shape)


def _fits(source: Tile, shape: tuple[int, ...]) -> bool:
    partitions, elements = shape[0], prod(shape[1:])
    if source.shape[0] != partitions:
        return False
    padded = source.shape + (1,) * (len(shape) - source.ndim)
    return source.elements in (1, elements) or all(a in (1, b) for a, b in zip(padded, shape, strict=False))


def elementwise(
    engine: Engine,
    op: str,
    dst: Tile,
    sources: Sequence[Any],
    function: Callable[..., Any],
    mask: Mask = None,
    shape: tuple[int, ...] | None = None,
    adds: bool = False,
    kept: Mask = None,
    aligned: bool = True,
) -> None:
    """``dst = function(*sources)`` on one of the elementwise engines; sources are tiles or numbers.

    ``shape`` is that of the largest source where it is not the destination's (reductions); ``mask`` is then that of
    the source and ``kept`` that of the destination. ``aligned`` False: ``function`` takes each source in its own shape.
    """
    machine = current()
    spaces = (Space.SBUF,) if engine is Engine.GPSIMD else (Space.SBUF, Space.PSUM)
    to = mask if shape is None else kept
    written = _operand(machine, dst, f"the result of {op}", spaces, to)
    _no_overlap(machine, dst, to)
    reads = []
    shape = dst.shape if shape is None else shape
    for source in sources:
        if isinstance(source, Tile):
            region = _operand(machine, source, f"an operand of {op}", spaces, mask)
            if aligned and not _fits(source, shape):
                machine.fail("shape", f"an operand of {op} does not fit the result", shape, source.shape)
            _no_hazard(machine, dst, written, source, region)
            reads.append(region)
        elif isinstance(source, LoopIndex) or (isinstance(source, np.ndarray) and source.ndim):
            machine.fail("operand", f"an operand of {op} must be a tile or a number, not {source!r}")
    machine.emit(
        engine, op, tuple(reads), (written,), dtype=dtype_name(dst.dtype), partitions=dst.shape[0],
        elements=prod(shape[1:]),
    )  # fmt: skip
    _mark(dst, written, engine)
    if machine.data:
        exact = op in _MOVES and getattr(sources[0], "dtype", None) == dst.dtype
        values: list[Any] = []
        for source in sources:
            if not isinstance(source, Tile):
                values.append(np.float32(source))
                continue
            read = source.read(mask if source.shape == shape else None, adds)
            read = read if exact else read.astype(np.float32)
            values.append(_fit(read, source, shape) if aligned else read)
        with np.errstate(all="ignore"):
            dst.write(function(*values), to, adds)


def dma(dst: Tile, src: Tile, mask: Mask = None) -> None:
    """Move ``src`` to ``dst`` between HBM and SBUF, converting through float32 where the dtypes differ."""
    machine = current()
    for tile, role in ((dst, "destination"), (src, "source")):
        if not isinstance(tile, Tile):
            machine.fail("operand", f"the {role} of a DMA must be a tile, not {type(tile).__name__}")
        if tile.space is Space.PSUM:
            machine.fail("operand space", f"the {role} of a DMA must be in hbm or sbuf", "hbm or sbuf", "psum")
        machine.check_scope(tile.storage)
        tile.inside(mask)
    if dst.storage.immutable:
        machine.fail("immutable", "a jitted kernel may not write its parameter: annotate it nt.mutable_tensor, or copy")
    if dst.size != src.size:
        machine.fail("shape", "source and destination of a DMA differ in size", dst.shape, src.shape)
    _no_overlap(machine, dst, mask)
    regions = [_hull(t) for t in (src, dst)]
    _no_hazard(machine, dst, regions[1], src, regions[0])
    count = dst.size if mask is None else int(np.broadcast_to(mask, dst.shape).sum())
    size = dst.dtype.itemsize
    chip = dst if dst.space is Space.SBUF else src
    machine.emit(
        Engine.DMA, "dma", (regions[0],), (regions[1],), dtype=dtype_name(dst.dtype), partitions=chip.shape[0],
        bytes=count * size, row_bytes=min(_run(dst), _run(src)) * size, source=src.space, target=dst.space,
    )  # fmt: skip
    if machine.data:
        values = src.read(mask)
        dst.write(values.reshape(dst.shape), mask)


def _hull(tile: Tile) -> Region:
    if tile.beyond is None:
        return tile.region()
    record = tile.storage.record
    return Region(record.id, 0, record.partitions, 0, record.bytes_per_partition)


def _run(tile: Tile) -> int:
    """Contiguous elements of the view: in HBM over all axes, on chip within a partition."""
    run = 1
    first = 0 if tile.space is Space.HBM else 1
    for n, stride in zip(reversed(tile.shape[first:]), reversed(tile.strides[first:]), strict=True):
        if n > 1 and stride != run:
            break
        run *= n
    return run


def memset(dst: Tile, value: float, engine: Engine = Engine.VECTOR, mask: Mask = None) -> None:
    """Fill ``dst`` with a constant."""
    elementwise(engine, "memset", dst, (), lambda: np.asarray(value, np.float32), mask)


def fresh(shape: tuple[int, ...], dtype: Any, space: Space = Space.SBUF, mask: Mask = None) -> Tile:
    """A tile for the result of the next instruction (first dialect and infix operators)."""
    tile = declare(shape, as_dtype(dtype), space)
    tile.result, tile.mask = len(current().trace.instructions), mask
    return tile


def compute(op: Op, operands: Sequence[Any], dtype: Any = None, mask: Mask = None) -> Tile:
    """Run an operator of the language on tiles and numbers; the result is a new tile in SBUF.

    Its dtype is ``dtype``, else bool for comparisons and logic, else the promoted dtype of the operands.
    """
    tiles = [t for t in operands if isinstance(t, Tile)]
    if not tiles:
        current().fail("operand", f"nl.{op.name} needs a tile")
    shape = np.broadcast_shapes(*(t.shape + (1,) * (max(x.ndim for x in tiles) - t.ndim) for t in tiles))
    default = BOOL if op.logical else promoted(*(o.dtype if isinstance(o, Tile) else o for o in operands))
    result = fresh(shape if len(shape) > 1 else (*shape, 1), dtype or default, mask=mask)
    elementwise(op.engine, op.name, result, [_spread(o, result.shape) for o in operands], op.function, mask)
    return result


def _spread(operand: Any, shape: tuple[int, ...]) -> Any:
    """A tile of one partition repeated over those of ``shape``, for which the compiler finds the instructions."""
    if isinstance(operand, Tile) and operand.shape[0] == 1 < shape[0]:
        return operand.broadcast_to((shape[0], *operand.shape[1:]))
    return operand


@dataclass(frozen=True)
class LoopReduction:
    """What ``nl.loop_reduce`` gives: assigned to a tile it becomes ``tile = op(tile, value)`` in each iteration."""

    tile: Tile
    op: Op
    mask: Mask = None


def assign(dst: Tile, value: Any) -> None:
    """``tile[...] = value``: redirect the instruction that just made ``value``, else copy on the vector engine."""
    machine = current()
    if isinstance(value, LoopReduction):
        op = value.op
        return elementwise(op.engine, op.name, dst, (dst, value.tile), op.function, value.mask, adds=True)
    if not isinstance(value, Tile):
        return memset(dst, value)
    same = (value.offset, value.shape, value.strides) == (dst.offset, dst.shape, dst.strides)
    if value.storage is dst.storage and same:
        return None  # the second half of ``tile[...] += x``
    maker = machine.trace.instructions[value.result] if value.result >= 0 else None
    moved = maker if maker is not None and maker.engine is Engine.TENSOR and dst.space is not Space.PSUM else None
    if moved is not None and moved.op != "transpose":  # the compiler makes two instructions of a transposition
        machine.fail("operand space", "the tensor engine writes only PSUM", "psum", dst.space.value)
    if maker is None or moved is not None or value.result != len(machine.trace.instructions) - 1:
        return elementwise(Engine.VECTOR, "copy", dst, (value,), OPS["copy"].function, value.mask)
    if maker.engine is Engine.DMA and dst.space is Space.PSUM:
        machine.fail("operand space", "the destination of a DMA must be in hbm or sbuf", "hbm or sbuf", "psum")
    _redirect(machine, dst, value, adds=False)
    return None


def accumulate(dst: Tile, value: Any) -> None:
    """``tile += value``: a product just made joins ``dst``'s accumulation, else the vector engine adds."""
    machine = current()
    last = machine.trace.instructions[-1] if machine.trace.instructions else None
    made = isinstance(value, Tile) and value.result == len(machine.trace.instructions) - 1
    if made and last is not None and last.engine is Engine.TENSOR and dst.space is Space.PSUM:
        _redirect(machine, dst, value, adds=True)
    else:
        elementwise(Engine.VECTOR, "add", dst, (dst, value), np.add, adds=True)


def _redirect(machine: Machine, dst: Tile, value: Tile, adds: bool) -> None:
    """Make the last instruction, which wrote the whole of ``value``, write ``dst`` instead."""
    machine.check_scope(value.storage)
    last = machine.trace.instructions[-1]
    tensor = last.engine is Engine.TENSOR
    if last.engine is Engine.DMA:
        written = dst.region()
    else:
        written = _operand(
            machine, dst, f"the result of {last.op}", (Space.PSUM,) if tensor else (Space.SBUF, Space.PSUM)
        )
    if (dst.shape[0], dst.size) != (value.shape[0], value.size):
        machine.fail("result shape", "the assigned result has another shape", dst.shape, value.shape)
    if tensor:
        _check_result(machine, dst, written, FLOAT32 if last.op == "matmul" else value.dtype)
        last.accumulate = _joins(machine, dst, written, adds)
    else:
        _no_overlap(machine, dst)
        _mark(dst, written, last.engine)
    last.writes, last.dtype = (written,), last.dtype if tensor else dtype_name(dst.dtype)
    machine.trace.buffers[dst.storage.record.id].released = len(machine.trace.instructions)
    if machine.trace.buffers[-1] is value.storage.record:
        machine.trace.buffers.pop()
    else:
        value.storage.record.released = value.storage.record.allocated
    if machine.data:
        made = value.read()
        if last.accumulate:
            made = made + dst.read(accumulating=True).reshape(made.shape)
        dst.write(made.reshape(dst.shape), value.mask, adds)
