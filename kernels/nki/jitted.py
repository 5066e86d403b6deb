"""The kernels as NKI 0.3 to 0.7 compiles them: every argument is a tensor, a number or a tuple of numbers.

``sizes``: the fields of :class:`.objects.Sizes`. ``first``: tokens come first. A ``plan`` describes how a weight is
packed; ``plans`` are those of the MLP's six factors. ``at``: the first column of each factor in ``table``. This module
and its imports keep to the language guide of NKI 0.3, the narrowest of these versions
(tests/kernels/nki/test_language.py).
"""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.nki.dialect_nki import Dialect
from neuronmm.kernels.nki.low_rank_matmul import low_rank_matmul
from neuronmm.kernels.nki.low_rank_mlp import Weights, low_rank_swiglu_mlp, weights
from neuronmm.kernels.nki.objects import Factor, Options, Sizes, factor


def linear(x: Any, a: Any, b: Any, a_plan: Any, b_plan: Any, sizes: Any, epsilon: Any, first: Any) -> Any:
    """y = B (A x)."""
    return _linear(x, a, b, a_plan, b_plan, sizes, Options(epsilon, tokens_first=first))


def linear_residual(
    x: Any, a: Any, b: Any, extra: Any, a_plan: Any, b_plan: Any, sizes: Any, epsilon: Any, first: Any
) -> Any:
    """y = B (A x) + residual."""
    return _linear(x, a, b, a_plan, b_plan, sizes, Options(epsilon, adds=True, residual=extra, tokens_first=first))


def linear_bias(
    x: Any, a: Any, b: Any, vector: Any, a_plan: Any, b_plan: Any, sizes: Any, epsilon: Any, first: Any
) -> Any:
    """y = B (A x) + bias."""
    return _linear(x, a, b, a_plan, b_plan, sizes, Options(epsilon, True, vector, tokens_first=first))


def linear_bias_residual(
    x: Any, a: Any, b: Any, vector: Any, extra: Any, a_plan: Any, b_plan: Any, sizes: Any, epsilon: Any, first: Any
) -> Any:
    """y = B (A x) + bias + residual."""
    return _linear(x, a, b, a_plan, b_plan, sizes, Options(epsilon, True, vector, True, extra, first))


def linear_scaled(
    x: Any, a: Any, b: Any, table: Any, a_plan: Any, b_plan: Any, at: Any, sizes: Any, epsilon: Any, biased: Any,
    first: Any,
) -> Any:  # fmt: skip
    """y = B (A x) (+ bias) with factors in fp8."""
    factors = factor(a, a_plan, True, table, at[0]), factor(b, b_plan, True, table, at[1])
    return _compute(x, factors[0], factors[1], sizes, Options(epsilon, biased, tokens_first=first))


def linear_scaled_residual(
    x: Any, a: Any, b: Any, table: Any, extra: Any, a_plan: Any, b_plan: Any, at: Any, sizes: Any, epsilon: Any,
    biased: Any, first: Any,
) -> Any:  # fmt: skip
    """y = B (A x) (+ bias) + residual with factors in fp8."""
    factors = factor(a, a_plan, True, table, at[0]), factor(b, b_plan, True, table, at[1])
    return _compute(x, factors[0], factors[1], sizes, Options(epsilon, biased, 0.0, True, extra, first))


def mlp(
    x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, down_b: Any, plans: Any, sizes: Any,
    epsilon: Any, first: Any,
) -> Any:  # fmt: skip
    """down(silu(gate(x)) * up(x))."""
    w = weights((gate_a, gate_b, up_a, up_b, down_a, down_b), plans, False)
    return _mlp(x, w, sizes, Options(epsilon, tokens_first=first))


def mlp_residual(
    x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, down_b: Any, extra: Any, plans: Any,
    sizes: Any, epsilon: Any, first: Any,
) -> Any:  # fmt: skip
    """down(silu(gate(x)) * up(x)) + residual."""
    w = weights((gate_a, gate_b, up_a, up_b, down_a, down_b), plans, False)
    return _mlp(x, w, sizes, Options(epsilon, adds=True, residual=extra, tokens_first=first))


def mlp_shared(
    x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, down_b: Any, plans: Any, sizes: Any, epsilon: Any,
    first: Any,
) -> Any:  # fmt: skip
    """down(silu(gate(x)) * up(x)); gate and up share one A."""
    w = weights((gate_a, gate_b, gate_a, up_b, down_a, down_b), plans, True)
    return _mlp(x, w, sizes, Options(epsilon, tokens_first=first))


def mlp_shared_residual(
    x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, down_b: Any, extra: Any, plans: Any, sizes: Any,
    epsilon: Any, first: Any,
) -> Any:  # fmt: skip
    """down(silu(gate(x)) * up(x)) + residual; gate and up share one A."""
    w = weights((gate_a, gate_b, gate_a, up_b, down_a, down_b), plans, True)
    return _mlp(x, w, sizes, Options(epsilon, adds=True, residual=extra, tokens_first=first))


def mlp_scaled(
    x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, down_b: Any, table: Any, plans: Any, at: Any,
    sizes: Any, epsilon: Any, first: Any,
) -> Any:  # fmt: skip
    """down(silu(gate(x)) * up(x)) with factors in fp8."""
    w = weights((gate_a, gate_b, up_a, up_b, down_a, down_b), plans, False, True, table, at)
    return _mlp(x, w, sizes, Options(epsilon, tokens_first=first))


def mlp_scaled_residual(
    x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, down_b: Any, table: Any, extra: Any,
    plans: Any, at: Any, sizes: Any, epsilon: Any, first: Any,
) -> Any:  # fmt: skip
    """down(silu(gate(x)) * up(x)) + residual with factors in fp8."""
    w = weights((gate_a, gate_b, up_a, up_b, down_a, down_b), plans, False, True, table, at)
    return _mlp(x, w, sizes, Options(epsilon, adds=True, residual=extra, tokens_first=first))


def mlp_shared_scaled(
    x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, down_b: Any, table: Any, plans: Any, at: Any, sizes: Any,
    epsilon: Any, first: Any,
) -> Any:  # fmt: skip
    """down(silu(gate(x)) * up(x)) with factors in fp8; gate and up share one A."""
    w = weights((gate_a, gate_b, gate_a, up_b, down_a, down_b), plans, True, True, table, at)
    return _mlp(x, w, sizes, Options(epsilon, tokens_first=first))


def mlp_shared_scaled_residual(
    x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, down_b: Any, table: Any, extra: Any, plans: Any, at: Any,
    sizes: Any, epsilon: Any, first: Any,
) -> Any:  # fmt: skip
    """down(silu(gate(x)) * up(x)) + residual with factors in fp8; gate and up share one A."""
    w = weights((gate_a, gate_b, gate_a, up_b, down_a, down_b), plans, True, True, table, at)
    return _mlp(x, w, sizes, Options(epsilon, adds=True, residual=extra, tokens_first=first))


def _linear(x: Any, a: Any, b: Any, a_plan: Any, b_plan: Any, sizes: Any, options: Options) -> Any:
    return _compute(x, factor(a, a_plan), factor(b, b_plan), sizes, options)


def _compute(x: Any, a: Factor, b: Factor, sizes: Any, options: Options) -> Any:
    d, out = Dialect(), b.columns.size
    y = d.output((x.shape[0], out) if options.tokens_first else (out, x.shape[1]), x.dtype)
    low_rank_matmul(d, x, a, b, y, _blocks(sizes), options)
    return y


def _mlp(x: Any, w: Weights, sizes: Any, options: Options) -> Any:
    d = Dialect()
    y = d.output(x.shape, x.dtype)
    low_rank_swiglu_mlp(d, x, w, y, _blocks(sizes), options)
    return y


def _blocks(sizes: Any) -> Sizes:
    return Sizes(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4])
