"""The kernels for callers of ``nki`` 0.3 to 0.7: functions of tensors that return the kernel's output.

Each factory takes the static arguments. The function it returns works out block sizes and packing for its tensors and
launches the compiled kernel of :mod:`.jitted` on one core, so neither NKI's compiler nor torch.compile sees the solver.
``layout`` and packed weights are those of :mod:`.entry_neuronxcc`. ``blocks`` None: :mod:`.tiling` chooses for
``core``: trn2, whose choices fit trn3 as well. ``jit``: a host's decorator of the kernels, None: ``nki.jit``. Importing
this module needs the Neuron SDK or the emulator.
"""

# Without the SDK, pyright takes this folder for the package nki.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from operator import index
from typing import Any

import nki
import torch

from neuronmm.kernels.hardware import TRN2, NeuronCore
from neuronmm.kernels.nki import jitted
from neuronmm.kernels.nki.choice import (
    TensorType,
    linear_blocks,
    linear_plans,
    mlp_blocks,
    mlp_plans,
    sizes,
    tokens_first,
)
from neuronmm.kernels.nki.layout import FactorPlan
from neuronmm.kernels.nki.objects import Chunks
from neuronmm.kernels.nki.problem import Blocks, Ranks
from neuronmm.kernels.nki.table import starts
from neuronmm.kernels.ops import Form


def low_rank_matmul(
    rank: int, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False, bias: bool = False,
    layout: str = "HSB", form: Form = Form.TWO, pivots: int = 0, scaled: bool = False, core: NeuronCore = TRN2,
    jit: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return ``launch(x, a, b[, bias][, residual])``: B (A x) (+ bias) (+ residual).

    Dimensions: bias [out]; residual like the output. ``form``, ``pivots``: as in :mod:`.entry_neuronxcc`. ``scaled``:
    ``launch(x, a, b, table[, residual])``, as there.
    """
    first = tokens_first(layout)
    kernel: Any
    jit = jit or nki.jit
    if scaled:
        kernel = jit(jitted.linear_scaled_residual if residual else jitted.linear_scaled)
    elif bias:
        kernel = jit(jitted.linear_bias_residual if residual else jitted.linear_bias)
    else:
        kernel = jit(jitted.linear_residual if residual else jitted.linear)

    @torch.compiler.assume_constant_result
    def choose(
        shape: tuple[int, ...], dtype: Any, factors: Any, elements: int
    ) -> tuple[tuple[FactorPlan, ...], tuple[int, ...]]:
        x, a, cut = TensorType(dtype, shape), TensorType(factors), Chunks(rank)
        outputs = elements // (cut.width * cut.count) + (rank if form is Form.ROWS else 0)
        chosen = blocks or linear_blocks(x, a, rank, outputs, core, epsilon > 0, residual, first, form, pivots)
        return linear_plans(sizes(x, first)[0], rank, outputs, a, form, pivots), astuple(chosen)

    def launch(x: Any, a: Any, b: Any, *extras: Any) -> Any:
        plans, chosen = choose(_fixed(x.shape), x.dtype, a.dtype, index(b.shape[0]))
        if scaled:
            at = starts(plans, epsilon > 0)
            return kernel[1](x, a, b, *extras, *plans, at, chosen, epsilon, bias, first)
        return kernel[1](x, a, b, *extras, *plans, chosen, epsilon, first)

    return launch


def low_rank_swiglu_mlp(
    ranks: Ranks, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False, layout: str = "HSB",
    scaled: bool = False, core: NeuronCore = TRN2, jit: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return ``launch(x, gate_a, gate_b, up_a, up_b, down_a, down_b[, residual])``: down(silu(gate(x)) * up(x)).

    ``scaled``: after the factors, which are in fp8, ``launch`` takes their table (:func:`.table.table`).
    """
    kernel: Any = jitted.mlp_residual if residual else jitted.mlp
    if scaled:
        kernel = jitted.mlp_scaled_residual if residual else jitted.mlp_scaled
    return _mlp((jit or nki.jit)(kernel), ranks, blocks, epsilon, residual, False, tokens_first(layout), scaled, core)


def low_rank_swiglu_mlp_shared(
    ranks: Ranks, blocks: Blocks | None = None, epsilon: float = 0.0, residual: bool = False, layout: str = "HSB",
    scaled: bool = False, core: NeuronCore = TRN2, jit: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return ``launch(x, gate_a, gate_b, up_b, down_a, down_b[, residual])``: the MLP with one A for gate and up.

    ``scaled``: as in :func:`low_rank_swiglu_mlp`.
    """
    kernel: Any = jitted.mlp_shared_residual if residual else jitted.mlp_shared
    if scaled:
        kernel = jitted.mlp_shared_scaled_residual if residual else jitted.mlp_shared_scaled
    return _mlp((jit or nki.jit)(kernel), ranks, blocks, epsilon, residual, True, tokens_first(layout), scaled, core)


def _fixed(shape: Any) -> tuple[int, ...]:
    """Return a shape as numbers.

    torch.compile makes a symbol of a size that differs between calls. ``index``, unlike ``int``, makes it a number of
    the graph, so that each size has a graph of its own.
    """
    return tuple([index(size) for size in shape])


def _mlp(
    kernel: Any, ranks: Ranks, blocks: Blocks | None, epsilon: float, residual: bool, shared: bool, first: bool,
    scaled: bool, core: NeuronCore,
) -> Callable[..., Any]:  # fmt: skip
    @torch.compiler.assume_constant_result
    def choose(shape: tuple[int, ...], dtype: Any, factors: Any) -> tuple[tuple[FactorPlan, ...], tuple[int, ...]]:
        x, w = TensorType(dtype, shape), TensorType(factors)
        chosen = blocks or mlp_blocks(x, w, ranks, shared, core, epsilon > 0, residual, first)
        return mlp_plans(sizes(x, first)[0], ranks, w, shared), astuple(chosen)

    def launch(x: Any, *tensors: Any) -> Any:
        plans, chosen = choose(_fixed(x.shape), x.dtype, tensors[0].dtype)
        columns = (starts(plans, epsilon > 0, shared),) if scaled else ()
        return kernel[1](x, *tensors, plans, *columns, chosen, epsilon, first)

    return launch
