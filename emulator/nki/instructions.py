"""The elementwise and reducing instructions in destination-passing form, built on :mod:`.engines`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from neuronmm.emulator.nki.dtypes import FLOAT32, as_dtype
from neuronmm.emulator.nki.engines import elementwise, fresh, matmul, transposed
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.ops import ACTIVATIONS, OPS, as_op
from neuronmm.emulator.nki.tile import Mask, Tile, declare
from neuronmm.emulator.nki.trace import Engine, Space

_REDUCERS: dict[str, Callable[..., Any]] = {"add": np.sum, "maximum": np.max, "minimum": np.min, "multiply": np.prod}
_REDUCTIONS = {
    **{name: name for name in _REDUCERS},
    "max": "maximum",
    "min": "minimum",
    "sum": "add",
    "prod": "multiply",
}


def _column(tile: Any, data: Tile, role: str) -> Any:
    """Check a per-partition operand: a number, or a [partitions, 1] tile."""
    if isinstance(tile, Tile) and (tile.shape[0] != data.shape[0] or tile.elements != 1):
        current().fail("shape", f"{role} must be a number or one element a partition", (data.shape[0], 1), tile.shape)
    return tile


def need_float32(operand: Any, role: str) -> None:
    """Refuse a tile of another dtype; a number is fine."""
    if isinstance(operand, Tile) and operand.dtype != FLOAT32:
        current().fail("operand dtype", f"{role} must be float32", "float32", operand.dtype.name)


def activation(
    dst: Tile, op: Any, data: Tile, bias: Any = None, scale: Any = 1.0, mask: Mask = None, reduced: Tile | None = None
) -> None:
    """``dst = op(data * scale + bias)`` on the scalar engine; ``reduced`` receives the sum over the free axes."""
    machine, name, function = current(), as_op(op).name, as_op(op).function
    if name not in ACTIVATIONS:
        machine.fail("activation", f"the scalar engine has no activation {name}", ", ".join(sorted(ACTIVATIONS)), name)
    need_float32(scale, "the scale of an activation")
    _column(scale, data, "scale")
    _column(bias, data, "bias")
    if machine.core.name == "v2" and not (bias is None or isinstance(bias, Tile)):
        machine.fail("operand", "the bias of an activation is a tile on NeuronCore-v2", "[partitions, 1] tile", bias)
    offset = 0.0 if bias is None else bias
    elementwise(
        Engine.SCALAR, name, dst, (data, scale, offset), lambda x, s, b: function(x * s + b), mask
    )  # fmt: skip
    if reduced is not None:
        reduce(reduced, "add", dst, tuple(range(1, dst.ndim)), mask, Engine.SCALAR)


def reduce(
    dst: Tile, op: Any, data: Tile, axis: Any, mask: Mask = None, engine: Engine = Engine.VECTOR, negate: bool = False
) -> None:
    """Reduce free axes of ``data`` with add, maximum, minimum or multiply."""
    machine = current()
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple(a % data.ndim for a in axes)
    name = _REDUCTIONS.get(getattr(op, "name", getattr(op, "__name__", op)))
    if name is None:
        machine.fail("reduction", f"{op!r} is no reduction", ", ".join(_REDUCERS), str(op))
    if 0 in axes:
        machine.fail("reduction axis", "only free axes can be reduced", ">= 1", axes)
    reducer, sign = _REDUCERS[name], -1.0 if negate else 1.0

    def function(x: np.ndarray) -> np.ndarray:
        return sign * reducer(x, axis=axes).reshape(dst.shape)

    elementwise(engine, f"reduce_{name}", dst, (data,), function, mask, shape=data.shape)


def scalar_ops(
    dst: Tile, data: Tile, op0: Any, operand0: Any, reverse0: bool = False, op1: Any = None, operand1: Any = None,
    reverse1: bool = False, engine: Engine = Engine.VECTOR, mask: Mask = None,
) -> None:  # fmt: skip
    """``dst = (data op0 operand0) op1 operand1`` with per-partition operands."""
    first, second = as_op(op0), None if op1 is None else as_op(op1)
    for operand, role in ((operand0, "operand0"), (operand1, "operand1")):
        _column(operand, data, role)

    def function(x: np.ndarray, a: Any, b: Any) -> np.ndarray:
        y = first.function(a, x) if reverse0 else first.function(x, a)
        if second is None:
            return y
        return second.function(b, y) if reverse1 else second.function(y, b)

    elementwise(engine, "tensor_scalar", dst, (data, operand0, 0.0 if operand1 is None else operand1), function, mask)


def tensors(dst: Tile, a: Tile, b: Tile, op: Any, engine: Engine = Engine.VECTOR, mask: Mask = None) -> None:
    """``dst = a op b``; the operands cannot both lie in PSUM. GpSimd computes ``power``, and does not reach PSUM."""
    if all(isinstance(t, Tile) and t.space is Space.PSUM for t in (a, b)):
        current().fail("operand space", "both operands of tensor_tensor lie in psum", "one in sbuf", "psum, psum")
    where = Engine.GPSIMD if as_op(op).engine is Engine.GPSIMD else engine
    elementwise(where, as_op(op).name, dst, (a, b), as_op(op).function, mask)


def copy(dst: Tile, src: Tile, engine: Engine, mask: Mask = None) -> None:
    """``dst = src`` on chip; the scalar engine of NeuronCore-v2 copies only by ``activation``."""
    machine = current()
    if engine is Engine.SCALAR and machine.core.name == "v2":
        machine.fail("engine", "tensor_copy on the scalar engine of NeuronCore-v2", "vector or gpsimd", "scalar")
    elementwise(engine, "copy", dst, (src,), OPS["copy"].function, mask)


def scan(dst: Tile, a: Tile, b: Tile, initial: Any, op0: Any, op1: Any, mask: Mask = None) -> None:
    """``dst[:, t] = (dst[:, t-1] op0 a[:, t]) op1 b[:, t]`` along the free axis, on the vector engine."""
    first, second = as_op(op0).function, as_op(op1).function

    def function(x: np.ndarray, y: np.ndarray, start: Any) -> np.ndarray:
        result = np.empty_like(x)
        state = np.broadcast_to(start, x.shape)[:, 0]
        for t in range(x.shape[1]):
            state = second(first(state, x[:, t]), y[:, t])
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
