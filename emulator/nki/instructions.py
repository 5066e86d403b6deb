"""Elementwise, reducing and transposing instructions, destination first, built on :mod:`.engines`.

The ISA modules of both dialects call these; each raises NkiError if an operand breaks a rule of the instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from neuronmm.emulator.nki.dtypes import FLOAT32, as_dtype
from neuronmm.emulator.nki.engines import elementwise, matmul, transpose_dtype
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.ops import ACTIVATIONS, OPS, as_op
from neuronmm.emulator.nki.results import new_result
from neuronmm.emulator.nki.tile import Mask, Tile, declare
from neuronmm.emulator.nki.trace import Engine, Space

_REDUCERS: dict[str, tuple[Callable[..., Any], float]] = {
    "add": (np.sum, 0.0),
    "maximum": (np.max, -np.inf),
    "minimum": (np.min, np.inf),
    "multiply": (np.prod, 1.0),
}
"""Reduction -> NumPy function and neutral element."""
VECTOR_TRANSPOSE = 32
"""Most partitions, and elements per partition, of a transpose on the vector engine."""
_REDUCTION_NAMES = {
    **{name: name for name in _REDUCERS},
    "max": "maximum",
    "min": "minimum",
    "sum": "add",
    "prod": "multiply",
}


def check_column(tile: Any, data: Tile, role: str) -> None:
    """Raise NkiError unless ``tile`` is a per-partition operand of ``data``: a number or a [partitions, 1] tile."""
    if isinstance(tile, Tile) and (tile.shape[0] != data.shape[0] or tile.elements != 1):
        current().fail("shape", f"{role} must be a number or one element per partition", (data.shape[0], 1), tile.shape)


def check_equal_sizes(op: str, dst: Tile, *sources: Any) -> None:
    """Raise NkiError unless the tiles that ``op`` reads element by element have the partitions and elements of dst."""
    for source in sources:
        if isinstance(source, Tile) and (source.shape[0], source.elements) != (dst.shape[0], dst.elements):
            current().fail("shape", f"{op} does not broadcast: an operand has another size", dst.shape, source.shape)


def check_result_size(op: str, dst: Tile, partitions: int, elements: int) -> None:
    """Raise NkiError unless ``dst`` has the partitions and the elements per partition of the result of ``op``."""
    if (dst.shape[0], dst.elements) != (partitions, elements):
        message = f"the destination of {op} has another size than the result"
        current().fail("result shape", message, (partitions, elements), (dst.shape[0], dst.elements))


def reduction_of(op: Any) -> tuple[str, Callable[..., Any], float]:
    """Return name, NumPy function and neutral element of the reduction that ``op`` names."""
    name = _REDUCTION_NAMES.get(getattr(op, "name", getattr(op, "__name__", op)), "")
    if not name:
        current().fail("reduction", f"{op!r} is not a reduction", ", ".join(_REDUCERS), str(op))
    return name, *_REDUCERS[name]


def elementwise_and_reduce(
    engine: Engine, op: str, dst: Tile, sources: Sequence[Any], function: Callable[..., Any], mask: Mask,
    reduce_res: Tile | None, reduce_op: Any,
) -> None:  # fmt: skip
    """``dst = function(*sources)``; ``reduce_res`` [partitions, 1] receives the unrounded result reduced.

    The reduction is recorded first: if the kernel assigns the result to a tile, the last instruction must be dst's.
    """
    if reduce_res is not None:
        name, reducer, neutral = reduction_of(reduce_op)
        check_column(reduce_res, dst, "the reduction's result")
        axes = tuple(range(1, dst.ndim))

        def reduced(*values: Any) -> np.ndarray:
            result = np.broadcast_to(function(*values), dst.shape)
            selected = result if mask is None else np.where(mask, result, np.float32(neutral))
            return reducer(selected, axis=axes).reshape(reduce_res.shape)

        dst_mask = reduction_mask(dst, axes, mask, reduce_res.shape)
        elementwise(engine, f"accumulate_{name}", reduce_res, sources, reduced, mask, dst.shape, dst_mask=dst_mask)
    elementwise(engine, op, dst, sources, function, mask)


def require_float32(operand: Any, role: str) -> None:
    """Raise NkiError for a tile of another dtype than float32; a number is accepted."""
    if isinstance(operand, Tile) and operand.dtype != FLOAT32:
        current().fail("operand dtype", f"{role} must be float32", "float32", operand.dtype.name)


def activation(
    dst: Tile, op: Any, data: Tile, bias: Any = None, scale: Any = 1.0, mask: Mask = None,
    reduce_res: Tile | None = None, reduce_op: Any = None,
) -> None:  # fmt: skip
    """``dst = op(data * scale + bias)`` on the scalar engine; ``reduce_res`` receives the sum over the free axes.

    ``reduce_op`` names the reduction; the scalar engine only has the sum.
    """
    machine, name, function = current(), as_op(op).name, as_op(op).function
    if name not in ACTIVATIONS:
        machine.fail("activation", f"the scalar engine has no activation {name}", ", ".join(sorted(ACTIVATIONS)), name)
    require_float32(scale, "the scale of an activation")
    check_equal_sizes("an activation", dst, data)
    check_column(scale, data, "scale")
    check_column(bias, data, "bias")
    if machine.core.name == "v2" and not (bias is None or isinstance(bias, Tile)):
        machine.fail(
            "operand", "on NeuronCore-v2 the bias of an activation must be a tile", "[partitions, 1] tile", bias
        )
    offset = 0.0 if bias is None else bias
    if reduce_op is not None and reduction_of(reduce_op)[0] != "add":
        machine.fail("reduction", "an activation reduces with a sum only", "add", reduction_of(reduce_op)[0])
    elementwise_and_reduce(
        Engine.SCALAR, name, dst, (data, scale, offset), lambda x, s, b: function(x * s + b), mask, reduce_res, "add"
    )


def reduce(
    dst: Tile, op: Any, data: Tile, axis: Any, mask: Mask = None, engine: Engine = Engine.VECTOR, negate: bool = False
) -> None:
    """Reduce free axes of ``data`` with add, maximum, minimum or multiply.

    ``mask`` has the axes of ``data`` and excludes elements from the reduction. A result to which no element contributes
    is not written.
    """
    machine = current()
    axes = free_axes(data, axis)
    name, reducer, neutral = reduction_of(op)
    if 0 in axes:
        machine.fail("reduction axis", "only free axes can be reduced", ">= 1", axes)
    kept = prod(n for axis, n in enumerate(data.shape) if axis and axis not in axes)
    check_result_size("a reduction", dst, data.shape[0], kept)
    sign = -1.0 if negate else 1.0

    def function(x: np.ndarray) -> np.ndarray:
        selected = x if mask is None else np.where(mask, x, np.float32(neutral))
        return sign * reducer(selected, axis=axes).reshape(dst.shape)

    dst_mask = reduction_mask(data, axis, mask, dst.shape)
    elementwise(engine, f"reduce_{name}", dst, (data,), function, mask, data.shape, dst_mask=dst_mask)


def free_axes(data: Tile, axis: Any) -> tuple[int, ...]:
    """Return ``axis`` (one or several, negative from the end) as axis numbers of ``data``."""
    given = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple(a % data.ndim for a in given)
    if len(set(axes)) != len(given) or any(not -data.ndim <= a < data.ndim for a in given):
        current().fail("reduction axis", f"a tile of shape {data.shape} has no such axes", data.ndim - 1, given)
    return axes


def check_last_axes(data: Tile, axis: Any) -> None:
    """Raise NkiError unless ``axis`` names the last axes of ``data``, as ``tensor_reduce`` demands."""
    axes = sorted(free_axes(data, axis))
    last = list(range(data.ndim - len(axes), data.ndim))
    if axes != last:
        current().fail("reduction axis", "tensor_reduce reduces the last axes of a tile only", last, axes)


def reduction_mask(data: Tile, axis: Any, mask: Mask, shape: tuple[int, ...]) -> Mask:
    """Return the mask of a reduction's result, of ``shape``: True where an element under ``mask`` contributes."""
    if mask is None:
        return None
    reduced: Any = np.broadcast_to(mask, data.shape).any(axis=free_axes(data, axis))
    return reduced.reshape(shape)


def masks_partially(data: Tile, axis: Any, mask: np.ndarray) -> bool:
    """Return whether ``mask`` selects some but not all elements along the reduced axes."""
    selected, axes = np.broadcast_to(mask, data.shape), free_axes(data, axis)
    return bool((selected.any(axis=axes) != selected.all(axis=axes)).any())


_ON_SCALAR = (("multiply", "add"), ("multiply", None), ("add", None))
"""The pairs of operators of ``tensor_scalar`` that the scalar engine has."""


def tensor_scalar(
    dst: Tile, data: Tile, op0: Any, operand0: Any, reverse0: bool = False, op1: Any = None, operand1: Any = None,
    reverse1: bool = False, engine: Engine = Engine.VECTOR, mask: Mask = None, reduce_res: Tile | None = None,
    reduce_op: Any = None,
) -> None:  # fmt: skip
    """``dst = (data op0 operand0) op1 operand1`` with per-partition operands; the flags swap an operator's operands.

    ``reduce_res`` as in :func:`elementwise_and_reduce`.
    """
    first, second = as_op(op0), None if op1 is None else as_op(op1)
    pair = first.name, None if second is None else second.name
    if engine is Engine.SCALAR and pair not in _ON_SCALAR:
        current().fail("engine", "the scalar engine has no tensor_scalar with these operators", _ON_SCALAR, pair)
    check_equal_sizes("tensor_scalar", dst, data)
    for operand, role in ((operand0, "operand0"), (operand1, "operand1")):
        check_column(operand, data, role)

    def function(x: np.ndarray, a: Any, b: Any) -> np.ndarray:
        y = first.function(a, x) if reverse0 else first.function(x, a)
        if second is None:
            return y
        return second.function(b, y) if reverse1 else second.function(y, b)

    operands = (data, operand0, 0.0 if operand1 is None else operand1)
    elementwise_and_reduce(engine, "tensor_scalar", dst, operands, function, mask, reduce_res, reduce_op)


def scalar_tensor_tensor(
    dst: Tile, data: Tile, op0: Any, operand0: Any, op1: Any, operand1: Tile, reverse0: bool = False,
    reverse1: bool = False, mask: Mask = None,
) -> None:  # fmt: skip
    """``dst = (data op0 operand0) op1 operand1``: a per-partition operand, then a tile; one of the tiles in SBUF."""
    first, second = as_op(op0).function, as_op(op1).function
    check_equal_sizes("scalar_tensor_tensor", dst, data, operand1)
    check_column(operand0, data, "operand0")
    _check_one_in_sbuf(data, operand1, "scalar_tensor_tensor")

    def function(x: np.ndarray, a: Any, b: np.ndarray) -> np.ndarray:
        y = first(a, x) if reverse0 else first(x, a)
        return second(b, y) if reverse1 else second(y, b)

    elementwise(Engine.VECTOR, "scalar_tensor_tensor", dst, (data, operand0, operand1), function, mask)


def _check_one_in_sbuf(a: Any, b: Any, op: str) -> None:
    if all(isinstance(t, Tile) and t.space is Space.PSUM for t in (a, b)):
        current().fail("operand space", f"both operands of {op} are in psum", "one in sbuf", "psum, psum")


def tensor_tensor(
    dst: Tile, a: Tile, b: Tile, op: Any, engine: Engine = Engine.VECTOR, mask: Mask = None, exact: bool = False
) -> None:
    """``dst = a op b``; one operand must be in SBUF. GpSimd computes ``power`` and cannot access PSUM.

    ``exact``: the engine computes on integers.
    """
    check_equal_sizes("tensor_tensor", dst, a, b)
    _check_one_in_sbuf(a, b, "tensor_tensor")
    engine = Engine.GPSIMD if as_op(op).engine is Engine.GPSIMD else engine
    elementwise(engine, as_op(op).name, dst, (a, b), as_op(op).function, mask, exact=exact)


def copy(dst: Tile, src: Tile, engine: Engine, mask: Mask = None) -> None:
    """``dst = src`` on chip; on NeuronCore-v2 the scalar engine copies only with ``activation``."""
    machine = current()
    if engine is Engine.SCALAR and machine.core.name == "v2":
        machine.fail("engine", "NeuronCore-v2 has no tensor_copy on the scalar engine", "vector or gpsimd", "scalar")
    elementwise(engine, "copy", dst, (src,), OPS["copy"].function, mask)


def scan(
    dst: Tile, a: Tile, b: Tile, initial: Any, op0: Any, op1: Any, reverse0: bool = False, reverse1: bool = False,
    mask: Mask = None,
) -> None:  # fmt: skip
    """``dst[:, t] = (a[:, t] op0 dst[:, t-1]) op1 b[:, t]`` along the free axis, on the vector engine."""
    check_equal_sizes("tensor_tensor_scan", dst, a, b)
    first, second = as_op(op0).function, as_op(op1).function

    def function(x: np.ndarray, y: np.ndarray, start: Any) -> np.ndarray:
        result = np.empty_like(x)
        state = np.broadcast_to(start, x.shape)[:, 0]
        for t in range(x.shape[1]):
            state = first(state, x[:, t]) if reverse0 else first(x[:, t], state)
            state = second(y[:, t], state) if reverse1 else second(state, y[:, t])
            result[:, t] = state
        return result

    elementwise(Engine.VECTOR, "tensor_tensor_scan", dst, (a, b, initial), function, mask)


def transpose(dst: Tile, data: Tile, engine: Engine | None = None) -> None:
    """``dst = data^T`` on the tensor or the vector engine; without ``engine`` the space of ``dst`` selects it.

    The tensor engine multiplies with an identity: data [p, f <= 128] in SBUF, dst [f, p] in PSUM. The vector engine
    moves bits: both sides up to 32, in SBUF or PSUM, of one dtype.
    Source: https://awsdocs-neuron.readthedocs-hosted.com/general/nki/api/generated/nki.isa.nc_transpose.html, and the
    release notes of NKI in SDK 2.32 for the selection.
    """
    machine, p = current(), data.shape[0]
    if engine is None and dst.space is Space.SBUF:
        engine = Engine.VECTOR
    _check_transposable(data, engine)
    if engine is Engine.VECTOR:
        _transpose_bits(dst, data)
        return
    identity = declare((p, p), data.dtype, name="identity")
    if machine.has_data:
        identity.storage.data = np.eye(p, dtype=data.dtype).reshape(-1)
    matmul(dst, data, identity, accumulate=False, transpose=True)


def _check_transposable(data: Tile, engine: Engine | None) -> None:
    """Raise NkiError unless ``engine`` (None: the tensor engine) transposes, and tiles as large as ``data``."""
    machine, p, f = current(), data.shape[0], data.elements
    if engine is Engine.VECTOR and max(p, f) > VECTOR_TRANSPOSE:
        machine.fail("transpose size", "the vector engine transposes smaller tiles", VECTOR_TRANSPOSE, (p, f))
    if engine not in (None, Engine.TENSOR, Engine.VECTOR):
        machine.fail("engine", "this engine transposes nothing", "tensor or vector", engine.value)
    if engine is not Engine.VECTOR and f > machine.core.stationary_columns:
        limit = machine.core.stationary_columns
        machine.fail("stationary size", "the tile to transpose has too many columns", limit, f)


def _transpose_bits(dst: Tile, data: Tile) -> None:
    p, f = data.shape[0], data.elements
    check_result_size("nc_transpose", dst, f, p)
    if (dst.storage, dst.offset) == (data.storage, data.offset):
        current().fail("overlapping write", "a transpose in place would write elements before it reads them")
    if dst.dtype != data.dtype:
        current().fail("result dtype", "a transpose keeps the dtype", data.dtype.name, dst.dtype.name)
    elementwise(
        Engine.VECTOR, "transpose", dst, (data,), lambda values: values.reshape(p, f).T.reshape(dst.shape),
        source_shape=data.shape, exact=True,
    )  # fmt: skip


def new_transpose(data: Tile, dtype: Any = None, engine: Engine | None = None) -> Tile:
    """Return ``data^T`` as a new tile; another ``dtype`` than the engine writes takes one more copy.

    The tile is in PSUM; of the vector engine in SBUF.
    """
    _check_transposable(data, engine)
    on_vector = engine is Engine.VECTOR
    space = Space.SBUF if on_vector else Space.PSUM
    written_dtype = data.dtype if on_vector else transpose_dtype(current().core, data.dtype)
    result = new_result((data.elements, data.shape[0]), written_dtype, space)
    transpose(result, data, engine)
    if dtype is None or as_dtype(dtype) == written_dtype:
        return result
    cast = new_result(result.shape, dtype, space)
    copy(cast, result, Engine.VECTOR)
    return cast


def check_identity(tile: Tile) -> None:
    """Raise NkiError unless the moving operand of a matmul marked ``is_transpose`` is an identity."""
    machine, p = current(), tile.shape[0]
    if tile.elements != p:
        machine.fail("identity", "is_transpose needs a square identity as the moving operand", (p, p), tile.shape)
    if machine.has_data and not np.array_equal(tile.read().reshape(p, p).astype(np.float32), np.eye(p)):
        machine.fail("identity", "is_transpose needs an identity as the moving operand")
