"""The kernels as NKI 0.3 to 0.6 compiles them: every argument is a tensor, a number or a tuple of numbers.

``sizes``: the fields of :class:`.objects.Sizes`. ``first``: tokens come first. A ``plan`` describes how a weight is
packed; ``plans`` are those of the MLP's six factors. This module and its imports keep to the language guide of NKI 0.3,
the narrowest of these versions (tests/kernels/nki/test_language.py).
"""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.nki.dialect_nki import Dialect
from neuronmm.kernels.nki.low_rank_matmul import low_rank_matmul
from neuronmm.kernels.nki.low_rank_mlp import Weights, low_rank_swiglu_mlp, weights
from neuronmm.kernels.nki.objects import Options, Sizes, factor


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


def _linear(x: Any, a: Any, b: Any, a_plan: Any, b_plan: Any, sizes: Any, options: Options) -> Any:
    d, fb = Dialect(), factor(b, b_plan)
    out = fb.columns.size
    y = d.output((x.shape[0], out) if options.tokens_first else (out, x.shape[1]), x.dtype)
    low_rank_matmul(d, x, factor(a, a_plan), fb, y, _blocks(sizes), options)
    return y


def _mlp(x: Any, w: Weights, sizes: Any, options: Options) -> Any:
    d = Dialect()
    y = d.output(x.shape, x.dtype)
    low_rank_swiglu_mlp(d, x, w, y, _blocks(sizes), options)
    return y


def _blocks(sizes: Any) -> Sizes:
    return Sizes(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4])
