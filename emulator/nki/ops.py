"""The operators of ``nki.language``: a call on tiles runs one instruction; as an argument of an ISA call, its op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from neuronmm.emulator.nki.trace import Engine

_COEFFICIENTS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def _erf(x: np.ndarray) -> np.ndarray:
    """Return erf(x) by Abramowitz and Stegun 7.1.26 in float64; the error is below 1.5e-7."""
    x = x.astype(np.float64)
    t = 1 / (1 + 0.3275911 * np.abs(x))
    poly = sum(c * t ** (i + 1) for i, c in enumerate(_COEFFICIENTS))
    return np.sign(x) * (1 - poly * np.exp(-x * x))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Op:
    """One operator: ``function`` on float32 arrays, the engine that runs it, the number of operands.

    ``logical`` operators return booleans unless the kernel names a dtype.
    """

    def __init__(self, name: str, function: Callable[..., np.ndarray], engine: Engine, operands: int) -> None:
        self.name, self.function, self.engine, self.operands = name, function, engine, operands
        self.logical = name in _LOGICAL

    def __call__(self, *operands: Any, dtype: Any = None, mask: Any = None) -> Any:
        return results.compute(self, operands, dtype, mask)

    def __repr__(self) -> str:
        return f"nl.{self.name}"


_BINARY: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "power": np.power,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
}
_LOGICAL = frozenset(
    ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or")
)
_ACTIVATIONS: dict[str, Callable[..., np.ndarray]] = {
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "square": np.square,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * 0.5 * (1 + _erf(x / np.sqrt(2))),
    "gelu_apprx_sigmoid": lambda x: x * _sigmoid(1.702 * x),
    "gelu_apprx_tanh": lambda x: x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "softplus": lambda x: np.logaddexp(x, 0),
    "erf": _erf,
    "sin": np.sin,
    "cos": np.cos,
    "abs": np.abs,
    "sign": np.sign,
}
_VECTOR_UNARY: dict[str, Callable[..., np.ndarray]] = {
    "copy": lambda x: x,
    "negative": np.negative,
    "reciprocal": np.reciprocal,
}

ACTIVATIONS = frozenset({*_ACTIVATIONS, "copy", "reciprocal"} - {"cos"})
"""The functions of ``nki.isa.activation`` by the SDK's table. It lacks the cosine, though ``nl.cos`` exists."""

OPS: dict[str, Op] = {
    **{name: Op(name, f, Engine.GPSIMD if name == "power" else Engine.VECTOR, 2) for name, f in _BINARY.items()},
    **{name: Op(name, f, Engine.SCALAR, 1) for name, f in _ACTIVATIONS.items()},
    **{name: Op(name, f, Engine.VECTOR, 1) for name, f in _VECTOR_UNARY.items()},
}
"""Name in ``nki.language`` -> operator."""


def as_op(op: Any) -> Op:
    """Return ``op`` as an operator; the first dialect also takes NumPy functions (``np.add``).

    Raises:
        TypeError: ``op`` names no operator of the emulator.
    """
    operator = op if isinstance(op, Op) else OPS.get(getattr(op, "__name__", ""))
    if operator is None:
        raise TypeError(f"{op!r} is not an operator that the emulator has: {', '.join(sorted(OPS))}")
    return operator


# At the end because of a cycle: operators run instructions, and instructions look up operators.
from neuronmm.emulator.nki import results  # noqa: E402
