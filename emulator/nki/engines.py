"""The instructions of the engines: matmul, elementwise and DMA. The ISA modules of both dialects build on these.

Every function writes a destination tile. It checks the operands and records the instruction; in a run with data it
also computes, in float32, and rounds once, to the destination's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from neuronmm.emulator.nki.dtypes import FLOAT32, dtype_name
from neuronmm.emulator.nki.machine import Machine, current
from neuronmm.emulator.nki.operands import (
    bounding_region,
    check_distinct_elements,
    check_no_overlap,
    check_operand,
)
from neuronmm.emulator.nki.symbol import LoopIndex
from neuronmm.emulator.nki.tile import Mask, Tile
from neuronmm.emulator.nki.trace import Engine, Region, Space
from neuronmm.emulator.nki.type_rules import check_matmul_inputs, matmul_results
from neuronmm.kernels.hardware import NeuronCore

_BIT_COPIES = frozenset(("copy", "nc_stream_shuffle", "tensor_copy_predicated"))
"""Instructions that copy bits, without float32 in between, if the first source has the dtype of the result."""


def matmul(dst: Tile, stationary: Tile, moving: Tile, accumulate: bool | None, transpose: bool = False) -> None:
    """``dst (+)= stationary^T moving`` on the tensor engine.

    Dimensions: stationary [K <= 128, M <= 128] and moving [K, N <= 512] in SBUF, dst [M, N] in one PSUM bank, float32.
    ``accumulate`` None: the first matmul into a PSUM location overwrites it, later ones add. ``transpose``: ``moving``
    is an identity and dst has the dtype that :func:`transpose_dtype` gives.

    Raises:
        NkiError: an operand breaks a rule of the tensor engine, or the accumulation is not allowed.
    """
    machine = current()
    core = machine.core
    reads = (
        check_operand(machine, moving, "moving", (Space.SBUF,)),
        check_operand(machine, stationary, "stationary", (Space.SBUF,)),
    )
    written = check_operand(machine, dst, "the result of a matmul", (Space.PSUM,))
    (k, m), n = (stationary.shape[0], stationary.elements), moving.elements
    if moving.shape[0] != k:
        machine.fail("contraction", "stationary and moving differ in partitions", k, moving.shape[0])
    if m > core.stationary_columns:
        machine.fail("stationary size", "stationary has too many columns", core.stationary_columns, m)
    if n > core.moving_columns:
        machine.fail("moving size", "moving has too many columns", core.moving_columns, n)
    if (dst.shape[0], dst.elements) != (m, n):
        machine.fail(
            "result shape", "the destination has another shape than the result", (m, n), (dst.shape[0], dst.elements)
        )
    if not transpose:  # a transpose moves elements of any dtype
        check_matmul_inputs(core, stationary.dtype, moving.dtype)
    results = (transpose_dtype(core, stationary.dtype),) if transpose else matmul_results(core)
    check_matmul_result(machine, dst, written, results)
    accumulating = register_matmul(machine, dst, written, accumulate)
    machine.emit(
        Engine.TENSOR, "transpose" if transpose else "matmul", reads, (written,), dtype=dtype_name(stationary.dtype),
        k=k, m=m, n=n, accumulate=accumulating,
    )  # fmt: skip
    if machine.has_data:
        with np.errstate(invalid="ignore", over="ignore"):
            a = stationary.read().reshape(k, m).astype(np.float32)
            # NeuronCore-v3 and later move the elements; v2 multiplies, and NaN and Inf spread through products with 0
            moves_elements = transpose and core.name != "v2"
            result = a.T if moves_elements else a.T @ moving.read().reshape(k, n).astype(np.float32)
            result = result.reshape(dst.shape)
            total = dst.read(accumulating=True) + result if accumulating else result
        dst.write(total, accumulating=accumulating)


def transpose_dtype(core: NeuronCore, dtype: np.dtype) -> np.dtype:
    """Return the dtype in which the tensor engine writes the transpose of a ``dtype`` tile to PSUM.

    NeuronCore-v2 multiplies with an identity, and every result is float32; from v3 the transpose mode keeps the dtype.
    Source: the architecture guides of Trainium/Inferentia2 ("Data Types") and Trainium2 ("Built-in Transpose
    Support").
    """
    return FLOAT32 if core.name == "v2" else dtype


def check_matmul_result(machine: Machine, dst: Tile, written: Region, dtypes: Sequence[np.dtype]) -> None:
    """Check the destination of the tensor engine: its dtype, one PSUM bank, no element twice."""
    if dst.dtype not in dtypes:
        message = f"the tensor engine of NeuronCore-{machine.core.name} writes this result in another dtype"
        machine.fail("result dtype", message, " or ".join(dtype.name for dtype in dtypes), dst.dtype.name)
    bank = machine.core.psum_bank_bytes
    if written.low // bank != (written.high - 1) // bank:
        machine.fail("psum bank", "the result crosses a PSUM bank", bank, written.high - written.low)
    check_distinct_elements(machine, dst)


def register_matmul(machine: Machine, dst: Tile, written: Region, accumulate: bool | None) -> bool:
    """Record the tensor engine as the writer of a PSUM location; return whether the matmul adds to its content.

    Raises:
        NkiError: the matmul adds to what no matmul wrote, or covers a part of another matmul's location.
    """
    writers = dst.storage.writers
    assert writers is not None
    location = written[1:]
    writer = writers.get(location)
    if writer is None:
        overlapping = [w for w in writers if written.overlaps(Region(written.buffer, *w))]
        if overlapping and accumulate is None:
            machine.fail(
                "accumulation group", "the matmul covers part of another matmul's location", overlapping[0], location
            )
        adds = bool(accumulate)
        if adds and not dst.storage.zeroed and _covered(location, overlapping) < _covered(location, [location]):
            machine.fail("accumulate", "the matmul accumulates on PSUM that no matmul wrote, or not all of it")
        engines = [writers[place] for place in overlapping]
        writer = next((engine for engine in engines if engine is not Engine.TENSOR), engines[0] if engines else None)
    else:
        adds = accumulate is not False
    if adds and writer not in (None, Engine.TENSOR):
        machine.fail("accumulate", f"the matmul accumulates on PSUM that the {writer.value} engine wrote")
    writers[location] = Engine.TENSOR
    return adds and (writer is not None or not dst.storage.zeroed)


def _covered(location: Sequence[int], places: Sequence[Sequence[int]]) -> int:
    """Return how many partitions x bytes of ``location`` the ``places`` that overlap it have, each counted alone."""
    first, last, low, high = location
    return sum(
        (min(last, place[1]) - max(first, place[0])) * (min(high, place[3]) - max(low, place[2])) for place in places
    )


def register_writer(dst: Tile, written: Region, engine: Engine) -> None:
    """Record ``engine`` as the writer of a location and of all that overlap it; only PSUM keeps such a record."""
    writers = dst.storage.writers
    if writers is not None:
        overlapping = [place for place in writers if written.overlaps(Region(written.buffer, *place))]
        writers.update(dict.fromkeys((*overlapping, written[1:]), engine))


def elementwise(
    engine: Engine,
    op: str,
    dst: Tile,
    sources: Sequence[Any],
    function: Callable[..., Any],
    mask: Mask = None,
    source_shape: tuple[int, ...] | None = None,
    accumulating: bool = False,
    dst_mask: Mask = None,
    broadcast: bool = True,
    exact: bool = False,
) -> None:
    """``dst = function(*sources)`` on the vector, scalar or GpSimd engine; sources are tiles or numbers.

    A reduction names ``source_shape``, the shape of its largest source; ``mask`` then has that shape and ``dst_mask``
    that of dst. ``broadcast`` False: ``function`` receives each source in its own shape. ``accumulating``: dst is also
    a source, as a sum over loop iterations. ``exact``: the engine computes in the dtype of the sources, not in float32.

    Raises:
        NkiError: an operand breaks a rule of the engine, or does not fit the result.
    """
    machine = current()
    spaces = (Space.SBUF,) if engine is Engine.GPSIMD else (Space.SBUF, Space.PSUM)
    write_mask = mask if source_shape is None else dst_mask
    written = check_operand(machine, dst, f"the result of {op}", spaces, write_mask)
    check_distinct_elements(machine, dst, write_mask)
    reads: list[Region] = []
    full: list[int] = []
    shape = dst.shape if source_shape is None else source_shape
    elements = prod(shape[1:])
    for source in sources:
        if isinstance(source, Tile):
            region = check_operand(machine, source, f"an operand of {op}", spaces, mask)
            if broadcast and not _fits(source, shape):
                machine.fail("shape", f"an operand of {op} does not fit the result", shape, source.shape)
            check_no_overlap(machine, dst, written, source, region)
            if source.elements == elements:
                full.append(len(reads))
            reads.append(region)
        elif isinstance(source, LoopIndex) or (isinstance(source, np.ndarray) and source.ndim):
            machine.fail("operand", f"an operand of {op} must be a tile or a number, not {source!r}")
    machine.emit(
        engine, op, tuple(reads), (written,), dtype=dtype_name(dst.dtype), partitions=dst.shape[0],
        elements=elements, full=tuple(full),
    )  # fmt: skip
    register_writer(dst, written, engine)
    if machine.has_data:
        copies_bits = op in _BIT_COPIES and getattr(sources[0], "dtype", None) == dst.dtype
        values: list[Any] = []
        for source in sources:
            if not isinstance(source, Tile):
                values.append(np.float32(source))
                continue
            content = source.read(mask if source.shape == shape else None, accumulating)
            content = content if copies_bits or exact else content.astype(np.float32)
            values.append(_broadcast(content, shape) if broadcast else content)
        with np.errstate(all="ignore"):
            dst.write(function(*values), write_mask, accumulating)


def _fits(source: Tile, shape: tuple[int, ...]) -> bool:
    """Return whether a source has as many elements per partition as ``shape``, or broadcasts to it."""
    partitions, elements = shape[0], prod(shape[1:])
    if source.shape[0] != partitions:
        return False
    padded = source.shape + (1,) * (len(shape) - source.ndim)
    return source.elements in (1, elements) or all(a in (1, b) for a, b in zip(padded, shape, strict=False))


def _broadcast(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a source's values in ``shape``, the same elements per partition or broadcast over the free axes."""
    if values.shape == shape:
        return values
    if values.size == prod(shape):
        return values.reshape(shape)
    if values.ndim < len(shape):
        values = values.reshape(values.shape + (1,) * (len(shape) - values.ndim))
    return np.broadcast_to(values, shape)


def memset(dst: Tile, value: float, engine: Engine = Engine.VECTOR, mask: Mask = None) -> None:
    """Fill ``dst`` with a constant."""
    elementwise(engine, "memset", dst, (), lambda: np.asarray(value, np.float32), mask)


def dma(dst: Tile, src: Tile, mask: Mask = None) -> None:
    """Move ``src`` to ``dst`` between HBM and SBUF, through float32 if the dtypes differ.

    Raises:
        NkiError: an operand is in PSUM, read-only or out of bounds, the sizes differ, or the two overlap.
    """
    machine = current()
    for tile, role in ((dst, "destination"), (src, "source")):
        if not isinstance(tile, Tile):
            machine.fail("operand", f"the {role} of a DMA must be a tile, not {type(tile).__name__}")
        if tile.space is Space.PSUM:
            machine.fail("operand space", f"the {role} of a DMA must be in hbm or sbuf", "hbm or sbuf", "psum")
        machine.check_scope(tile.storage)
        tile.check_bounds(mask)
    if dst.storage.read_only:
        machine.fail("immutable", "a jitted kernel may not write its parameter: annotate it nt.mutable_tensor, or copy")
    if dst.size != src.size:
        machine.fail("shape", "source and destination of a DMA differ in size", dst.shape, src.shape)
    check_distinct_elements(machine, dst, mask)
    read, written = bounding_region(src), bounding_region(dst)
    check_no_overlap(machine, dst, written, src, read)
    count = dst.size if mask is None else int(np.broadcast_to(mask, dst.shape).sum())
    itemsize = (src if src.space is Space.HBM else dst).dtype.itemsize  # a DMA may cast; the memory's side counts
    on_chip = dst if dst.space is Space.SBUF else src
    machine.emit(
        Engine.DMA, "dma", (read,), (written,), dtype=dtype_name(dst.dtype), partitions=on_chip.shape[0],
        bytes=count * itemsize, row_bytes=min(_contiguous_elements(dst), _contiguous_elements(src)) * itemsize,
        source=src.space, target=dst.space,
    )  # fmt: skip
    if machine.has_data:
        values = src.read(mask)
        values = values if src.dtype == dst.dtype else values.astype(np.float32)
        dst.write(values.reshape(dst.shape), mask)


def _contiguous_elements(tile: Tile) -> int:
    """Return the length of the view's contiguous rows: in HBM over all axes, on chip within a partition."""
    length = 1
    first_axis = 0 if tile.space is Space.HBM else 1
    for n, stride in zip(reversed(tile.shape[first_axis:]), reversed(tile.strides[first_axis:]), strict=True):
        if n > 1 and stride != length:
            break
        length *= n
    return length
