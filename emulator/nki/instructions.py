"""The elementwise and reducing instructions in destination-passing form, built on :mod:`.engines`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from neuronmm.emulator.nki.dtypes import FLOAT32, as_dtype
from neuronmm.emulator.nki.engines import elementwise, fresh, matmul, transposed
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.ops import ACTIVATIONS, OPS, as_op
from neuronmm.emulator.nki.tile import Mask, Tile, declare
from neuronmm.emulator.nki.trace import Engine, Space

_REDUCERS: dict[str, tuple[Callable[..., Any], float]] = {
    "add": (np.sum, 0.0),
    "maximum": (np.max, -np.inf),
    "minimum": (np.min, np.inf),
    "multiply": (np.prod, 1.0),
}
"""Each reduction and its neutral element."""
_REDUCTIONS = {
    **{name: name for name in _REDUCERS},
    "max": "maximum",
    "min": "minimum",
    "sum": "add",
    "prod": "multiply",
}


def column(tile: Any, data: Tile, role: str) -> None:
    """Check a per-partition operand: a number, or a [partitions, 1] tile."""
    if isinstance(tile, Tile) and (tile.shape[0] != data.shape[0] or tile.elements != 1):
        current().fail("shape", f"{role} must be a number or one element a partition", (data.shape[0], 1), tile.shape)


def reduction_of(op: Any) -> tuple[str, Callable[..., Any], float]:
    """A reduction by its operator: name, NumPy function, neutral element."""
    name = _REDUCTIONS.get(getattr(op, "name", getattr(op, "__name__", op)), "")
    if not name:
        current().fail("reduction", f"{op!r} is no reduction", ", ".join(_REDUCERS), str(op))
    return name, *_REDUCERS[name]


def reducing(
    engine: Engine, op: str, dst: Tile, sources: Sequence[Any], function: Callable[..., Any], mask: Mask,
    reduced: Tile | None, by: Any,
) -> None:  # fmt: skip
    """``dst = function(*sources)``, and in ``reduced``, a column, that result in float32 reduced with ``by``.

    The reduction is recorded first: what a kernel assigns to a tile is the result of the last instruction.
    """
    if reduced is not None:
        name, reducer, neutral = reduction_of(by)
        column(reduced, dst, "the reduction's result")
        free = tuple(range(1, dst.ndim))

        def total(*values: Any) -> np.ndarray:
            result = np.broadcast_to(function(*values), dst.shape)
            chosen = result if mask is None else np.where(mask, result, np.float32(neutral))
            return reducer(chosen, axis=free).reshape(reduced.shape)

        kept = reduced_mask(dst, free, mask, reduced.shape)
        elementwise(engine, f"reduce_{name}", reduced, sources, total, mask, dst.shape, kept=kept)
    elementwise(engine, op, dst, sources, function, mask)


def need_float32(operand: Any, role: str) -> None:
    """Refuse a tile of another dtype; a number is fine."""
    if isinstance(operand, Tile) and operand.dtype != FLOAT32:
        current().fail("operand dtype", f"{role} must be float32", "float32", operand.dtype.name)


def activation(
    dst: Tile, op: Any, data: Tile, bias: Any = None, scale: Any = 1.0, mask: Mask = None, reduced: Tile | None = None,
    by: Any = None,
) -> None:  # fmt: skip
    """``dst = op(data * scale + bias)`` on the scalar engine; ``reduced`` receives the sum over the free axes.

    ``by`` is the reduction a kernel asks for, which can only be a sum.
    """
    machine, name, function = current(), as_op(op).name, as_op(op).function
    if name not in ACTIVATIONS:
        machine.fail("activation", f"the scalar engine has no activation {name}", ", ".join(sorted(ACTIVATIONS)), name)
    need_float32(scale, "the scale of an activation")
    column(scale, data, "scale")
    column(bias, data, "bias")
    if machine.core.name == "v2" and not (bias is None or isinstance(bias, Tile)):
        machine.fail("operand", "the bias of an activation is a tile on NeuronCore-v2", "[partitions, 1] tile", bias)
    offset = 0.0 if bias is None else bias
    if by is not None and reduction_of(by)[0] != "add":
        machine.fail("reduction", "an activation reduces with a sum only", "add", reduction_of(by)[0])
    reducing(
        Engine.SCALAR, as_op(op).name, dst, (data, scale, offset), lambda x, s, b: function(x * s + b), mask, reduced,
        "add",
    )  # fmt: skip


def reduce(
    dst: Tile, op: Any, data: Tile, axis: Any, mask: Mask = None, engine: Engine = Engine.VECTOR, negate: bool = False
) -> None:
    """Reduce free axes of ``data`` with add, maximum, minimum or multiply.

    Elements outside ``mask``, which has the axes of ``data``, take no part; a result of none of them is not written.
    """
    machine = current()
    axes = free_axes(data, axis)
    name, reducer, neutral = reduction_of(op)
    if 0 in axes:
        machine.fail("reduction axis", "only free axes can be reduced", ">= 1", axes)
    sign = -1.0 if negate else 1.0

    def function(x: np.ndarray) -> np.ndarray:
        chosen = x if mask is None else np.where(mask, x, np.float32(neutral))
        return sign * reducer(chosen, axis=axes).reshape(dst.shape)

    kept = reduced_mask(data, axis, mask, dst.shape)
    elementwise(engine, f"reduce_{name}", dst, (data,), function, mask, data.shape, kept=kept)


def free_axes(data: Tile, axis: Any) -> tuple[int, ...]:
    """``axis`` (one or several, from either end) as axis numbers of ``data``."""
    return tuple(a % data.ndim for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))


def reduced_mask(data: Tile, axis: Any, mask: Mask, shape: tuple[int, ...]) -> Mask:
    """Which elements of a reduction's result, of ``shape``, any element under ``mask`` contributes to."""
    if mask is None:
        return None
    reduced: Any = np.broadcast_to(mask, data.shape).any(axis=free_axes(data, axis))
    return reduced.reshape(shape)


def reduces_part(data: Tile, axis: Any, mask: np.ndarray) -> bool:
    """Whether ``mask`` keeps some elements along the reduced axes and leaves out others."""
    chosen, axes = np.broadcast_to(mask, data.shape), free_axes(data, axis)
    return bool((chosen.any(axis=axes) != chosen.all(axis=axes)).any())


def scalar_ops(
    dst: Tile, data: Tile, op0: Any, operand0: Any, reverse0: bool = False, op1: Any = None, operand1: Any = None,
    reverse1: bool = False, engine: Engine = Engine.VECTOR, mask: Mask = None, reduced: Tile | None = None,
    by: Any = None,
) -> None:  # fmt: skip
    """``dst = (data op0 operand0) op1 operand1`` with per-partition operands; ``reduced`` as :func:`reducing`."""
    first, second = as_op(op0), None if op1 is None else as_op(op1)
    for operand, role in ((operand0, "operand0"), (operand1, "operand1")):
        column(operand, data, role)

    def function(x: np.ndarray, a: Any, b: Any) -> np.ndarray:
        y = first.function(a, x) if reverse0 else first.function(x, a)
        if second is None:
            return y
        return second.function(b, y) if reverse1 else second.function(y, b)

    operands = (data, operand0, 0.0 if operand1 is None else operand1)
    reducing(engine, "tensor_scalar", dst, operands, function, mask, reduced, by)


def scalar_tensor(
    dst: Tile, data: Tile, op0: Any, operand0: Any, op1: Any, operand1: Tile, reverse0: bool = False,
    reverse1: bool = False, mask: Mask = None,
) -> None:  # fmt: skip
    """``dst = (data op0 operand0) op1 operand1``: a per-partition operand, then a tile; not both tiles in PSUM."""
    first, second = as_op(op0).function, as_op(op1).function
    column(operand0, data, "operand0")
    _one_in_sbuf(data, operand1, "scalar_tensor_tensor")

    def function(x: np.ndarray, a: Any, b: np.ndarray) -> np.ndarray:
        y = first(a, x) if reverse0 else first(x, a)
        return second(b, y) if reverse1 else second(y, b)

    elementwise(Engine.VECTOR, "scalar_tensor_tensor", dst, (data, operand0, operand1), function, mask)


def _one_in_sbuf(a: Any, b: Any, op: str) -> None:
    if all(isinstance(t, Tile) and t.space is Space.PSUM for t in (a, b)):
        current().fail("operand space", f"both operands of {op} lie in psum", "one in sbuf", "psum, psum")


def tensors(dst: Tile, a: Tile, b: Tile, op: Any, engine: Engine = Engine.VECTOR, mask: Mask = None) -> None:
    """``dst = a op b``; the operands cannot both lie in PSUM. GpSimd computes ``power``, and does not reach PSUM."""
    _one_in_sbuf(a, b, "tensor_tensor")
    where = Engine.GPSIMD if as_op(op).engine is Engine.GPSIMD else engine
    elementwise(where, as_op(op).name, dst, (a, b), as_op(op).function, mask)


def copy(dst: Tile, src: Tile, engine: Engine, mask: Mask = None) -> None:
    """``dst = src`` on chip; the scalar engine of NeuronCore-v2 copies only by ``activation``."""
    machine = current()
    if engine is Engine.SCALAR and machine.core.name == "v2":
        machine.fail("engine", "tensor_copy on the scalar engine of NeuronCore-v2", "vector or gpsimd", "scalar")
    elementwise(engine, "copy", dst, (src,), OPS["copy"].function, mask)


def scan(
    dst: Tile, a: Tile, b: Tile, initial: Any, op0: Any, op1: Any, reverse0: bool = False, reverse1: bool = False,
    mask: Mask = None,
) -> None:  # fmt: skip
    """``dst[:, t] = (a[:, t] op0 dst[:, t-1]) op1 b[:, t]`` along the free axis, on the vector engine."""
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


def transpose(dst: Tile, data: Tile) -> None:
    """``dst = data^T``, a product with the identity on the tensor engine: data [p, f <= 128] in SBUF, dst in PSUM."""
    machine = current()
    p = data.shape[0]
    if data.elements > machine.core.stationary_columns:
        machine.fail(
            "stationary size", "a transposed tile has too many columns", machine.core.stationary_columns, data.elements
        )
    identity = declare((p, p), data.dtype, name="identity")
    if machine.data:
        identity.storage.data = np.eye(p, dtype=data.dtype).reshape(-1)
    matmul(dst, data, identity, accumulate=False, transpose=True)


def transposition(data: Tile, dtype: Any = None) -> Tile:
    """``data^T`` as a new PSUM tile, in the dtype that the tensor engine writes or, by one more copy, in ``dtype``."""
    written = transposed(current().core, data.dtype)
    result = fresh((data.elements, data.shape[0]), written, Space.PSUM)
    transpose(result, data)
    if dtype is None or as_dtype(dtype) == written:
        return result
    cast = fresh(result.shape, dtype, Space.PSUM)
    copy(cast, result, Engine.VECTOR)
    return cast


def check_identity(tile: Tile) -> None:
    """Refuse a product marked as a transposition whose moving operand is no identity."""
    machine, p = current(), tile.shape[0]
    if tile.elements != p:
        machine.fail("identity", "a transposition multiplies with a square identity", (p, p), tile.shape)
    if machine.data and not np.array_equal(tile.read().reshape(p, p).astype(np.float32), np.eye(p)):
        machine.fail("identity", "a product marked is_transpose multiplies with something else than the identity")
