"""The operators of ``nki.language``: called on tiles they run one instruction, named in an ISA call they are its op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from neuronmm.emulator.nki.trace import Engine

_COEFFICIENTS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def _erf(x: np.ndarray) -> np.ndarray:
    """Abramowitz and Stegun 7.1.26 in float64: error below 1.5e-7."""
    x = x.astype(np.float64)
    t = 1 / (1 + 0.3275911 * np.abs(x))
    poly = sum(c * t ** (i + 1) for i, c in enumerate(_COEFFICIENTS))
    return np.sign(x) * (1 - poly * np.exp(-x * x))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Op:
    """One operator: ``function`` on float32 arrays, the engine that runs it, how many operands it takes.

    ``logical`` operators give booleans unless a dtype is asked for.
    """

    def __init__(self, name: str, function: Callable[..., np.ndarray], engine: Engine, operands: int) -> None:
        self.name, self.function, self.engine, self.operands = name, function, engine, operands
        self.logical = name in _LOGICAL

    def __call__(self, *operands: Any, dtype: Any = None, mask: Any = None) -> Any:
        return engines.compute(self, operands, dtype, mask)

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
"""What ``nki.isa.activation`` computes, by the SDK's table; it has no cosine, though the language has ``nl.cos``."""

OPS: dict[str, Op] = {
    **{name: Op(name, f, Engine.GPSIMD if name == "power" else Engine.VECTOR, 2) for name, f in _BINARY.items()},
    **{name: Op(name, f, Engine.SCALAR, 1) for name, f in _ACTIVATIONS.items()},
    **{name: Op(name, f, Engine.VECTOR, 1) for name, f in _VECTOR_UNARY.items()},
}
"""Every operator by its name in ``nki.language``."""


def as_op(op: Any) -> Op:
    """The operator itself, or the one a NumPy function stands for (``np.add``), as the first dialect allows.

    Raises:
        TypeError: ``op`` names no operator of the emulator.
    """
    found = op if isinstance(op, Op) else OPS.get(getattr(op, "__name__", ""))
    if found is None:
        raise TypeError(f"{op!r} is not an operator of nki.language that the emulator knows: {', '.join(sorted(OPS))}")
    return found


# Calling an operator runs an instruction, and instructions look operators up: this comes last.
from neuronmm.emulator.nki import engines  # noqa: E402
