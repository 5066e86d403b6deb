"""The choices made before a kernel is traced: block sizes, and the packing of the weights.

The results are numbers and tuples of numbers, which every NKI compiler accepts as arguments.
"""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.hardware import NeuronCore
from neuronmm.kernels.nki.layout import Packing
from neuronmm.kernels.nki.problem import Blocks, MlpProblem, Problem, Ranks
from neuronmm.kernels.nki.tiling import solve
from neuronmm.kernels.ops import KernelError

FactorPlan = tuple[int, int, int, tuple[tuple[int, int, int, int], ...]]
"""Rows, columns, column chunks per panel, and (offset, first chunk, last chunk, columns) of each panel."""


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


def factor_plan(rows: int, columns: int, x: Any) -> FactorPlan:
    """Return how a weight [columns, rows] of ``x``'s dtype is packed."""
    packing = Packing.of(rows, columns, 4 if _dtype(x) == "float32" else 2)
    panels = tuple((p.offset, p.first, p.last, p.columns) for p in packing.panels())
    return rows, columns, packing.group, panels


def mlp_plans(hidden: int, ranks: Ranks, x: Any, shared: bool, partial: bool = False) -> tuple[FactorPlan, ...]:
    """Return how A and B of gate, up and down are packed.

    A factor that the variant does not read repeats another one (:func:`.low_rank_mlp.weights`).
    """
    gate_a = factor_plan(hidden, ranks.gate, x)
    down_a = factor_plan(ranks.intermediate, ranks.down, x)
    return (
        gate_a,
        factor_plan(ranks.gate, ranks.intermediate, x),
        gate_a if shared else factor_plan(hidden, ranks.up, x),
        factor_plan(ranks.gate if shared else ranks.up, ranks.intermediate, x),
        down_a,
        down_a if partial else factor_plan(ranks.down, hidden, x),
    )


def linear_blocks(
    x: Any, rank: int, outputs: int, core: NeuronCore, norm: bool = False, residual: bool = False, first: bool = False
) -> Blocks:
    """Return the solver's block sizes of ``y = B (A x)`` for this input."""
    inputs, tokens = sizes(x, first)
    return solve(Problem(tokens, inputs, rank, outputs, _dtype(x), norm, residual, first), core).blocks


def mlp_blocks(
    x: Any, ranks: Ranks, shared: bool, core: NeuronCore, norm: bool = False, residual: bool = False,
    first: bool = False,
) -> Blocks:  # fmt: skip
    """Return the solver's block sizes of the MLP for this input."""
    hidden, tokens = sizes(x, first)
    shape = tokens, hidden, ranks.intermediate, ranks.gate, ranks.up, ranks.down
    return solve(MlpProblem(*shape, _dtype(x), shared, norm, residual, first), core).blocks


def _dtype(x: Any) -> str:
    return "float32" if "32" in str(x.dtype) else "bfloat16"
