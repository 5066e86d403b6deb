"""The functions of ``nki.language`` of both dialects; :mod:`.modules` selects those of each.

The loops and the results as new tiles are those of the first dialect. A function raises NkiError at the kernel's line
if an operand breaks a rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod as prod_of
from typing import Any

import numpy as np

from neuronmm.emulator.nki import engines, instructions, neuronxcc_isa
from neuronmm.emulator.nki.dtypes import FLOAT32, as_dtype, promoted
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.neuronxcc_isa import reduction_result
from neuronmm.emulator.nki.ops import OPS, as_op
from neuronmm.emulator.nki.results import LoopReduction, new_result
from neuronmm.emulator.nki.symbol import LoopIndex
from neuronmm.emulator.nki.tile import Tile, declare
from neuronmm.emulator.nki.trace import Engine, Space

sbuf, psum, hbm, private_hbm = Space.SBUF, Space.PSUM, Space.HBM, Space.HBM
shared_hbm = object()
"""The HBM that all programs of a launch grid share."""


class fp32:
    """Constants of float32."""

    min = float(np.finfo(np.float32).min)


class tile_size:
    """The limits of a tile by their names in the language."""

    pmax, psum_fmax, gemm_stationary_fmax, gemm_moving_fmax = 128, 512, 128, 512
    bn_stats_fmax, psum_num_banks = 512, 8


def ndarray(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> Tile:
    """Allocate an unwritten tile or HBM tensor."""
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    if buffer is shared_hbm:
        return _shared(dims, as_dtype(dtype), name)
    return declare(dims, as_dtype(dtype), buffer or sbuf, name)


def top_level_ndarray(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> Tile:
    """Allocate as :func:`ndarray`; raise NkiError for shared HBM in a loop or outside of the kernel function itself.

    This is ``ndarray`` of the first dialect.
    """
    if buffer is shared_hbm and not current().at_top_level():
        current().fail("shared_hbm", "shared_hbm must be declared in the kernel function itself, outside of loops")
    return ndarray(shape, dtype, buffer, name)


def _shared(dims: tuple[int, ...], dtype: np.dtype, name: str) -> Tile:
    """Return the next shared tensor; the n-th that a program declares is the same in every program of the grid."""
    machine = current()
    position = machine.shared_count
    machine.shared_count += 1
    if position == len(machine.shared_tensors):
        machine.shared_tensors.append(declare(dims, dtype, Space.HBM, name))
    return machine.shared_tensors[position]


def zeros(
    shape: Any, dtype: Any = FLOAT32, buffer: Any = sbuf, name: str = "", lazy_initialization: bool = False
) -> Tile:
    """Return a tile of zeros. In PSUM this takes no instruction: the first matmul into it overwrites."""
    return full(shape, 0.0, dtype, buffer, name)


def full(
    shape: Any, fill_value: float, dtype: Any = FLOAT32, buffer: Any = sbuf, name: str = "",
    lazy_initialization: bool = False,
) -> Tile:  # fmt: skip
    """Return a tile filled with a constant; ``lazy_initialization``, a hint to the compiler, is ignored."""
    tile = ndarray(shape, dtype, buffer, name)
    if tile.space is Space.PSUM and fill_value == 0:
        tile.storage.zeroed = True
        if tile.storage.data is not None:
            tile.storage.data[...] = 0
    elif tile.partition == 0:
        engines.memset(tile, fill_value)
    else:  # a block dimension before the partitions: one memset per block
        for block in np.ndindex(tile.shape[: tile.partition]):
            engines.memset(tile[tuple(int(b) for b in block)], fill_value)
    return tile


def ones(shape: Any, dtype: Any = FLOAT32, buffer: Any = sbuf, name: str = "") -> Tile:
    """Return a tile of ones."""
    return full(shape, 1.0, dtype, buffer, name)


def empty_like(a: Tile, dtype: Any = None, *, buffer: Any = sbuf, name: str = "") -> Tile:
    """Return an unwritten tile with the shape, and by default the dtype, of ``a``."""
    return ndarray(a.shape, dtype or a.dtype, buffer, name)


def zeros_like(a: Tile, dtype: Any = None, *, buffer: Any = sbuf, name: str = "") -> Tile:
    """Return a tile of zeros with the shape, and by default the dtype, of ``a``."""
    return zeros(a.shape, dtype or a.dtype, buffer, name)


def shared_constant(constant: np.ndarray, dtype: Any = None) -> Tile:
    """Return an array known at compile time as a tensor in HBM; :func:`load` moves it on chip."""
    array = static_cast(constant, constant.dtype if dtype is None else dtype)
    tile = declare(array.shape, array.dtype, Space.HBM, "constant")
    if tile.storage.data is not None:
        tile.storage.data[...] = array.reshape(-1)
    return tile


def rand(shape: Any, dtype: Any = FLOAT32) -> Tile:
    """Return a tile of uniform numbers in [0, 1): NumPy's, the same in every run, unlike a device's."""
    tile = ndarray(shape, dtype)
    seed = len(current().trace.instructions)
    engines.elementwise(Engine.GPSIMD, "rand", tile, (), lambda: np.random.default_rng(seed).random(tile.shape))
    return tile


def static_cast(input_data: Any, dtype: Any) -> Any:
    """Return an array or a number, outside of a kernel, in another dtype."""
    return np.asarray(input_data).astype(as_dtype(dtype))


def shared_identity_matrix(n: int, dtype: Any = np.uint8) -> Tile:
    """Return an identity [n, n] as a constant in HBM."""
    return shared_constant(np.eye(n), dtype)


def load(src: Tile, *, mask: Any = None, dtype: Any = None) -> Tile:
    """Move an HBM tensor to a new SBUF tile."""
    shape = src.shape if len(src.shape) > 1 else (*src.shape, 1)
    result = new_result(shape, dtype or src.dtype, mask=mask)
    if src.space is not Space.HBM:
        current().fail("operand space", "nl.load reads hbm", "hbm", src.space.value)
    engines.dma(result, src, mask)
    return result


def store(dst: Tile, value: Any, *, mask: Any = None) -> None:
    """Move a tile to HBM; a tile in PSUM is copied to SBUF first."""
    if dst.space is not Space.HBM:
        current().fail("operand space", "nl.store writes hbm", "hbm", dst.space.value)
    is_psum = isinstance(value, Tile) and value.space is Space.PSUM
    engines.dma(dst, copy(value) if is_psum else value, mask)


def load_transpose2d(src: Tile, *, mask: Any = None, dtype: Any = None) -> Tile:
    """Move HBM [n, m] to a new SBUF tile [m, n] with a transposing DMA."""
    if src.space is not Space.HBM or src.ndim != 2:
        current().fail(
            "operand", "nl.load_transpose2d reads a matrix in hbm", "2 axes in hbm", f"{src.shape} {src.space.value}"
        )
    return neuronxcc_isa.dma_transpose(src, mask=mask, dtype=dtype)


def copy(x: Tile, *, mask: Any = None, dtype: Any = None) -> Tile:
    """Return a copy in SBUF."""
    return OPS["copy"](x, dtype=dtype, mask=mask)


def matmul(x: Tile, y: Tile, *, transpose_x: bool = False, mask: Any = None) -> Tile:
    """Return ``x y`` as a new PSUM tile, or ``x^T y`` with ``transpose_x``.

    Without ``transpose_x`` the tensor engine first transposes x. An operand in PSUM, such as the result of
    :func:`transpose`, is first copied to SBUF.
    """
    left, right = (t if t.space is Space.SBUF else copy(t) for t in (x, y))
    left = left if transpose_x else copy(transpose(left), dtype=x.dtype)
    result = new_result((left.elements, *right.shape[1:]), FLOAT32, Space.PSUM)
    engines.matmul(result, left, right, accumulate=False)
    return result


def transpose(x: Tile, *, dtype: Any = None, mask: Any = None) -> Tile:
    """Return ``x^T`` as a new PSUM tile."""
    return instructions.new_transpose(x if x.space is Space.SBUF else copy(x), dtype)


def _reduction(op: str) -> Any:
    def reduction(x: Tile, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False) -> Tile:
        result = reduction_result(x, axis, keepdims, dtype, mask)
        instructions.reduce(result, op, x, axis, mask)
        return result

    reduction.__name__ = op  # the ISA reductions accept nl.max as their op and look up this name
    return reduction


sum, max, min, prod = (_reduction(op) for op in ("add", "maximum", "minimum", "multiply"))


def mean(x: Tile, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False) -> Tile:
    """Return the mean over free axes; a mask must not cut along the reduced axes."""
    if mask is not None and instructions.masks_partially(x, axis, mask):
        current().fail("unsupported", "the emulator's nl.mean takes no mask along the reduced axis: sum and divide")
    total = sum(x, axis, dtype=dtype, mask=mask, keepdims=keepdims)
    return OPS["multiply"](total, total.elements / x.elements, dtype=dtype or x.dtype)


def softmax(x: Tile, axis: Any = -1, *, dtype: Any = None, mask: Any = None) -> Tile:
    """Return the softmax over the free axis."""
    numerator = OPS["exp"](x - max(x, axis, keepdims=True, mask=mask), dtype=FLOAT32, mask=mask)
    return OPS["divide"](numerator, sum(numerator, axis, keepdims=True, mask=mask), dtype=dtype or x.dtype, mask=mask)


def loop_reduce(x: Tile, op: Any, loop_indices: Any, *, dtype: Any = None, mask: Any = None) -> LoopReduction:
    """Return a value to be reduced over the iterations; the only use is ``tile[...] = loop_reduce(...)``.

    ``op`` is add, maximum or minimum: their result does not depend on the order of iterations.
    """
    if as_op(op).name not in ("add", "maximum", "minimum"):
        current().fail("reduction", "loops reduce with add, maximum or minimum", "add, maximum, minimum", str(op))
    return LoopReduction(x, as_op(op), mask)


def where(condition: Tile, x: Any, y: Any, *, dtype: Any = None, mask: Any = None) -> Tile:
    """Return ``x`` where ``condition`` is not 0, else ``y``."""
    default = promoted(*(o.dtype if isinstance(o, Tile) else o for o in (x, y)))
    result = new_result(condition.shape, dtype or default, mask=mask)
    engines.elementwise(Engine.VECTOR, "where", result, (condition, x, y), lambda c, a, b: np.where(c != 0, a, b), mask)
    return result


def broadcast_to(x: Tile, shape: tuple[int, ...]) -> Tile:
    """Return a view that repeats the axes of size 1."""
    return x.broadcast_to(shape)


def expand_dims(x: Tile, axis: int) -> Tile:
    """Return a view with a new axis of size 1."""
    return x[(slice(None),) * (axis % (x.ndim + 1)) + (None,)]


def program_id(axis: int = 0) -> int:
    """Return the index of this program along an axis of the launch grid."""
    return current().program[axis]


def num_programs(axes: int = 0) -> int:
    """Return the size of the launch grid along an axis."""
    return current().grid[axes]


def program_ndim() -> int:
    """Return the number of axes of the launch grid."""
    return len(current().grid)


def _range(start: int, stop: int | None, step: int) -> range:
    return range(start) if stop is None else range(start, stop, step)


def nc(count: int) -> int:
    """Return a dimension of the launch grid of ``count`` NeuronCores; here the programs run one after the other."""
    return count


def spmd_dim(*sizes: int) -> int:
    """Return several dimensions of the launch grid merged into one."""
    return prod_of(sizes)


def _loop(indices: range, parallel: bool) -> Iterator[LoopIndex]:
    return map(LoopIndex, current().iterate(indices, parallel=parallel, scoped=True))


def affine_range(start: int, stop: int | None = None, step: int = 1) -> Iterator[LoopIndex]:
    """Loop with symbolic indices; the iterations may run in any order and must not depend on each other."""
    return _loop(_range(start, stop, step), parallel=True)


def sequential_range(
    start: int, stop: int | None = None, step: int = 1, *, directives: Any = None
) -> Iterator[LoopIndex]:
    """Loop with symbolic indices, in order; as in :func:`affine_range`, allocations of the body end with it.

    ``directives``, for the compiler, are ignored.
    """
    return _loop(_range(start, stop, step), parallel=False)


def static_range(start: int, stop: int | None = None, step: int = 1) -> Iterator[int]:
    """Loop with Python integers, unrolled while the kernel is traced; allocations of the body outlive it."""
    return current().iterate(_range(start, stop, step))
