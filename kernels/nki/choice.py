"""The choices made before a kernel is traced: block sizes, and the packing of the weights.

The results are numbers and tuples of numbers, which every NKI compiler accepts as arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from neuronmm.kernels.hardware import NeuronCore
from neuronmm.kernels.nki.forms import linear_packings, mlp_packings
from neuronmm.kernels.nki.layout import FactorPlan, Packing
from neuronmm.kernels.nki.problem import FACTOR_BYTES, FP8, Blocks, MlpProblem, Problem, Ranks
from neuronmm.kernels.nki.tiling import solve
from neuronmm.kernels.ops import Form, KernelError


class TensorType(NamedTuple):
    """What a choice depends on of a tensor of any library; of factors the shape does not matter."""

    dtype: Any
    shape: tuple[int, ...] = ()


def tokens_first(layout: str) -> bool:
    """Return whether activations of this layout are [tokens, features].

    Raises:
        KernelError: the layout is neither "HSB" nor "BSH".
    """
    if layout not in ("HSB", "BSH"):
        raise KernelError(f'layout {layout!r}: must be "HSB" ([features, tokens]) or "BSH" ([tokens, features])')
    return layout == "BSH"


def sizes(x: Any, first: bool) -> tuple[int, int]:
    """Return the features and tokens of an activation; ``first``: tokens come first."""
    return (x.shape[1], x.shape[0]) if first else (x.shape[0], x.shape[1])


def factor_plan(rows: int, columns: int, w: Any) -> FactorPlan:
    """Return how a weight [columns, rows] of ``w``'s dtype is packed."""
    return Packing.of(rows, columns, element_bytes(w)).plan()


def linear_plans(
    inputs: int, rank: int, outputs: int, w: Any, form: Form = Form.TWO, pivots: int = 0
) -> tuple[FactorPlan, FactorPlan]:
    """Return how A and B of ``w``'s dtype are packed; ``pivots``: in the row form, the first of the pivots."""
    a, b = linear_packings(inputs, rank, outputs, element_bytes(w), form, pivots)
    return a.plan(), b.plan()


def mlp_plans(hidden: int, ranks: Ranks, w: Any, shared: bool, partial: bool = False) -> tuple[FactorPlan, ...]:
    """Return how A and B of gate, up and down, of ``w``'s dtype, are packed.

    A factor that the variant does not read repeats another one (:func:`.low_rank_mlp.weights`).
    """
    plans = [packing.plan() for packing in mlp_packings(hidden, ranks, shared, element_bytes(w))]
    return *plans[:5], plans[4] if partial else plans[5]


def linear_blocks(
    x: Any, a: Any, rank: int, outputs: int, core: NeuronCore, norm: bool = False, residual: bool = False,
    first: bool = False, form: Form = Form.TWO, pivots: int = 0,
) -> Blocks:  # fmt: skip
    """Return the solver's block sizes of ``y = B (A x)`` for this input and factors of ``a``'s dtype.

    Raises:
        KernelError: the kernel has a norm, and ``x`` is float16.
    """
    _check_norm(x, norm)
    inputs, tokens = sizes(x, first)
    shape = tokens, inputs, rank, outputs
    return solve(Problem(*shape, _dtype(x), norm, residual, first, form, pivots, _factors(x, a)), core).blocks


def mlp_blocks(
    x: Any, w: Any, ranks: Ranks, shared: bool, core: NeuronCore, norm: bool = False, residual: bool = False,
    first: bool = False,
) -> Blocks:  # fmt: skip
    """Return the solver's block sizes of the MLP for this input and factors of ``w``'s dtype.

    Raises:
        KernelError: the kernel has a norm, and ``x`` is float16.
    """
    _check_norm(x, norm)
    hidden, tokens = sizes(x, first)
    shape = tokens, hidden, ranks.intermediate, ranks.gate, ranks.up, ranks.down
    pivots = ranks.gate_pivots, ranks.up_pivots, ranks.down_pivots
    return solve(MlpProblem(*shape, _dtype(x), shared, norm, residual, first, *pivots, _factors(x, w)), core).blocks


def element_bytes(tensor: Any) -> int:
    """Return the bytes of an element of a tensor of any library."""
    return FACTOR_BYTES[_dtype(tensor)]


def _check_norm(x: Any, norm: bool) -> None:
    """Refuse a norm of float16, whose squares, in the dtype of ``x``, overflow from 256 on."""
    if norm and "float16" in str(x.dtype).replace("bfloat16", ""):
        raise KernelError("the fused norm takes bfloat16 and float32: squares of float16 overflow from 256 on")


def _factors(x: Any, w: Any) -> str:
    """Return the dtype of the factors as a problem has it, for activations ``x`` and one of the factors."""
    return "" if _dtype(w) == _dtype(x) else _dtype(w)


def _dtype(tensor: Any) -> str:
    if "float8" in str(tensor.dtype):
        return FP8
    return "float32" if "32" in str(tensor.dtype) else "bfloat16"
