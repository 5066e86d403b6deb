"""The kernels for callers of ``neuronxcc.nki``: plain functions of tensors, the output last.

Each factory takes the static arguments and returns the function to pass to ``nki_call`` or ``nki.jit``. ``layout``
"HSB": activations are [features, tokens], which is [h, s, b] with the last two axes merged. "BSH": [tokens, features],
which is [b, s, h] with the first two axes merged. :func:`.layout.pack` packs the weights. ``blocks`` None:
:mod:`.tiling` chooses for trn1. Importing this module needs the Neuron SDK or the emulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from neuronmm.kernels.hardware import TRN1
from neuronmm.kernels.nki import low_rank_matmul as matmul
from neuronmm.kernels.nki import low_rank_mlp as mlp
from neuronmm.kernels.nki.choice import (
    factor_plan,
    linear_blocks,
    linear_plans,
    mlp_blocks,
    mlp_plans,
    sizes,
    tokens_first,
)
from neuronmm.kernels.nki.dialect_neuronxcc import Dialect
from neuronmm.kernels.nki.objects import Options, Sizes, factor
from neuronmm.kernels.nki.problem import Blocks, Ranks
from neuronmm.kernels.nki.table import starts
from neuronmm.kernels.ops import Form


def low_rank_matmul(
    rank: int, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False, bias: bool = False,
    layout: str = "HSB", form: Form = Form.TWO, pivots: int = 0, scaled: bool = False,
) -> Callable[..., None]:  # fmt: skip
    """Return ``kernel(x, a, b[, bias][, residual], y)``: y = B (A x) (+ bias) (+ residual).

    Dimensions: bias [out]; residual like y. ``form``: of a and b, packed by :func:`.forms.linear_packings`. ``pivots``:
    in the row form, the first of ``rank`` consecutive outputs. ``scaled``: ``kernel(x, a, b, table[, residual], y)``
    with a and b in fp8, and their scales, the norm's weight and the bias in a table (:func:`.table.table`).
    """
    first = tokens_first(layout)

    def compute(x: Any, a: Any, b: Any, y: Any, options: Options, table: Any = 0.0) -> None:
        inputs, outputs = sizes(x, first)[0], sizes(y, first)[0]
        plans = linear_plans(inputs, rank, outputs, a, form, pivots)
        at = starts(plans, epsilon > 0)
        fa, fb = factor(a, plans[0], scaled, table, at[0]), factor(b, plans[1], scaled, table, at[1])
        chosen = blocks or linear_blocks(x, a, rank, outputs, TRN1, epsilon > 0, residual, first, form, pivots)
        matmul.low_rank_matmul(Dialect(), x, fa, fb, y, Sizes(*astuple(chosen)), options)

    def low_rank_matmul_kernel(x: Any, a: Any, b: Any, y: Any) -> None:
        compute(x, a, b, y, Options(epsilon, tokens_first=first))

    def low_rank_matmul_residual_kernel(x: Any, a: Any, b: Any, extra: Any, y: Any) -> None:
        compute(x, a, b, y, Options(epsilon, adds=True, residual=extra, tokens_first=first))

    def low_rank_matmul_bias_kernel(x: Any, a: Any, b: Any, vector: Any, y: Any) -> None:
        compute(x, a, b, y, Options(epsilon, True, vector, tokens_first=first))

    def low_rank_matmul_bias_residual_kernel(x: Any, a: Any, b: Any, vector: Any, extra: Any, y: Any) -> None:
        compute(x, a, b, y, Options(epsilon, True, vector, True, extra, first))

    def low_rank_matmul_scaled_kernel(x: Any, a: Any, b: Any, table: Any, y: Any) -> None:
        compute(x, a, b, y, Options(epsilon, bias, tokens_first=first), table)

    def low_rank_matmul_scaled_residual_kernel(x: Any, a: Any, b: Any, table: Any, extra: Any, y: Any) -> None:
        compute(x, a, b, y, Options(epsilon, bias, 0.0, True, extra, first), table)

    if scaled:
        return low_rank_matmul_scaled_residual_kernel if residual else low_rank_matmul_scaled_kernel
    if bias:
        return low_rank_matmul_bias_residual_kernel if residual else low_rank_matmul_bias_kernel
    return low_rank_matmul_residual_kernel if residual else low_rank_matmul_kernel


def packed_matmul(layout: str = "HSB") -> Callable[..., None]:
    """Return ``kernel(x, w, y)``: y = W x with one packed weight."""
    first = tokens_first(layout)

    def packed_matmul_kernel(x: Any, w: Any, y: Any) -> None:
        f = factor(w, factor_plan(sizes(x, first)[0], sizes(y, first)[0], w))
        matmul.packed_matmul(Dialect(), x, f, y, Options(tokens_first=first))

    return packed_matmul_kernel


def low_rank_swiglu_mlp(
    ranks: Ranks, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False, layout: str = "HSB",
    partial: bool = False, scaled: bool = False,
) -> Callable[..., None]:  # fmt: skip
    """Return ``kernel(x, gate_a, gate_b, up_a, up_b, down_a, down_b[, residual], y)``: down(silu(gate(x)) * up(x)).

    If ``ranks`` have pivots, :func:`.forms.mlp_packings` says how the factors are packed.
    ``partial``: ``kernel(x, gate_a, gate_b, up_a, up_b, down_a, y)``. y has the down projection's rank; the caller sums
    it over the cores and applies B of down. ``scaled``: after the factors, which are in fp8, the kernel takes the table
    of their scales and of the norm's weight (:func:`.table.table`).
    """
    first = tokens_first(layout)

    def compute(x: Any, tensors: tuple[Any, ...], y: Any, options: Options, table: Any = 0.0) -> None:
        plans = mlp_plans(sizes(x, first)[0], ranks, tensors[0], False, partial)
        w = mlp.weights(tensors, plans, False, scaled, table, starts(plans, epsilon > 0))
        chosen = blocks or mlp_blocks(x, tensors[0], ranks, False, TRN1, epsilon > 0, residual, first)
        mlp.low_rank_swiglu_mlp(Dialect(), x, w, y, Sizes(*astuple(chosen)), options)

    def low_rank_mlp_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, down_b: Any, y: Any
    ) -> None:
        w = gate_a, gate_b, up_a, up_b, down_a, down_b
        compute(x, w, y, Options(epsilon, tokens_first=first))

    def low_rank_mlp_residual_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, down_b: Any, extra: Any, y: Any
    ) -> None:
        w = gate_a, gate_b, up_a, up_b, down_a, down_b
        compute(x, w, y, Options(epsilon, adds=True, residual=extra, tokens_first=first))

    def low_rank_mlp_partial_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, y: Any
    ) -> None:
        w = gate_a, gate_b, up_a, up_b, down_a, down_a
        compute(x, w, y, Options(epsilon, tokens_first=first, partial=True))

    def low_rank_mlp_scaled_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, down_b: Any, table: Any, y: Any
    ) -> None:
        w = gate_a, gate_b, up_a, up_b, down_a, down_b
        compute(x, w, y, Options(epsilon, tokens_first=first), table)

    def low_rank_mlp_scaled_residual_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, down_b: Any, table: Any, extra: Any, y: Any
    ) -> None:
        w = gate_a, gate_b, up_a, up_b, down_a, down_b
        compute(x, w, y, Options(epsilon, adds=True, residual=extra, tokens_first=first), table)

    def low_rank_mlp_scaled_partial_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_a: Any, up_b: Any, down_a: Any, table: Any, y: Any
    ) -> None:
        w = gate_a, gate_b, up_a, up_b, down_a, down_a
        compute(x, w, y, Options(epsilon, tokens_first=first, partial=True), table)

    if scaled and partial:
        return low_rank_mlp_scaled_partial_kernel
    if scaled:
        return low_rank_mlp_scaled_residual_kernel if residual else low_rank_mlp_scaled_kernel
    if partial:
        return low_rank_mlp_partial_kernel
    return low_rank_mlp_residual_kernel if residual else low_rank_mlp_kernel


def low_rank_swiglu_mlp_shared(
    ranks: Ranks, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False, layout: str = "HSB",
    partial: bool = False, scaled: bool = False,
) -> Callable[..., None]:  # fmt: skip
    """Return ``kernel(x, gate_a, gate_b, up_b, down_a, down_b[, residual], y)``: the MLP with one A for gate and up.

    ``partial``: without ``down_b``; ``scaled``: with a table after the factors, as in :func:`low_rank_swiglu_mlp`.
    """
    first = tokens_first(layout)

    def compute(x: Any, tensors: tuple[Any, ...], y: Any, options: Options, table: Any = 0.0) -> None:
        plans = mlp_plans(sizes(x, first)[0], ranks, tensors[0], True, partial)
        w = mlp.weights(tensors, plans, True, scaled, table, starts(plans, epsilon > 0, True))
        chosen = blocks or mlp_blocks(x, tensors[0], ranks, True, TRN1, epsilon > 0, residual, first)
        mlp.low_rank_swiglu_mlp(Dialect(), x, w, y, Sizes(*astuple(chosen)), options)

    def low_rank_mlp_shared_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, down_b: Any, y: Any
    ) -> None:
        w = gate_a, gate_b, gate_a, up_b, down_a, down_b
        compute(x, w, y, Options(epsilon, tokens_first=first))

    def low_rank_mlp_shared_residual_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, down_b: Any, extra: Any, y: Any
    ) -> None:
        w = gate_a, gate_b, gate_a, up_b, down_a, down_b
        compute(x, w, y, Options(epsilon, adds=True, residual=extra, tokens_first=first))

    def low_rank_mlp_shared_partial_kernel(x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, y: Any) -> None:
        w = gate_a, gate_b, gate_a, up_b, down_a, down_a
        compute(x, w, y, Options(epsilon, tokens_first=first, partial=True))

    def low_rank_mlp_shared_scaled_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, down_b: Any, table: Any, y: Any
    ) -> None:
        w = gate_a, gate_b, gate_a, up_b, down_a, down_b
        compute(x, w, y, Options(epsilon, tokens_first=first), table)

    def low_rank_mlp_shared_scaled_residual_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, down_b: Any, table: Any, extra: Any, y: Any
    ) -> None:
        w = gate_a, gate_b, gate_a, up_b, down_a, down_b
        compute(x, w, y, Options(epsilon, adds=True, residual=extra, tokens_first=first), table)

    def low_rank_mlp_shared_scaled_partial_kernel(
        x: Any, gate_a: Any, gate_b: Any, up_b: Any, down_a: Any, table: Any, y: Any
    ) -> None:
        w = gate_a, gate_b, gate_a, up_b, down_a, down_a
        compute(x, w, y, Options(epsilon, tokens_first=first, partial=True), table)

    if scaled and partial:
        return low_rank_mlp_shared_scaled_partial_kernel
    if scaled:
        return low_rank_mlp_shared_scaled_residual_kernel if residual else low_rank_mlp_shared_scaled_kernel
    if partial:
        return low_rank_mlp_shared_partial_kernel
    return low_rank_mlp_shared_residual_kernel if residual else low_rank_mlp_shared_kernel
