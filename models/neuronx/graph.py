"""Build one decoder layer as a graph with a host's own graph functions, for any host.

The hidden state is [hidden, sequence, batch] (the hosts' HSB layout) or [batch, sequence, hidden] (BSH). Linears merge
sequence and batch into one dimension, *tokens*: [features, tokens] or [tokens, features], without a transpose.
Attention uses [sequence, batch, heads, head size], like the hosts' attention functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from neuronmm.kernels.hardware import TRN1, NeuronCore
from neuronmm.models.neuronx import kernels
from neuronmm.models.neuronx.architecture import Architecture
from neuronmm.models.neuronx.settings import Settings
from neuronmm.models.neuronx.weights import BY_INPUT, LayerPlan, names


@dataclass(frozen=True)
class GraphOps:
    """A host's graph functions. Arguments that differ between hosts are already bound.

    ``f`` is the module of elementary functions (reshape, transpose, dot_general, add, ...). ``score(query, key)``,
    ``mask(score, mask)``, ``context(prior, active, cached values, value)``, ``combine(score, value)``, ``rotate(query,
    key, positions)`` and ``update(cached keys, cached values, cache_ids, key, value, start_ids)`` are its attention.
    """

    f: Any
    silu: Callable[[Any], Any]
    norm: Callable[..., Any]
    rotate: Callable[..., tuple[Any, Any]]
    scale: Callable[..., Any]
    score: Callable[..., Any]
    mask: Callable[..., Any]
    context: Callable[..., Any]
    combine: Callable[..., Any]
    update: Callable[..., tuple[Any, Any]]
    all_reduce: Callable[[Any], Any]
    nki_call: Callable[..., Any]


@dataclass(frozen=True)
class Step:
    """The host's values for all layers of one step: cache slots, rotary positions and attention masks.

    ``active_mask`` is None in prefill.
    """

    cache_ids: Any
    start_ids: Any
    positions: Any
    mask: Any
    active_mask: Any


class LayerGraph:
    """Builds decoder layers with ``ops``."""

    def __init__(self, ops: GraphOps, architecture: Architecture, settings: Settings) -> None:
        self.ops, self.architecture, self.settings = ops, architecture, settings
        self.bsh = settings.layout == "BSH"

    def __call__(
        self, plan: LayerPlan, hidden: Any, step: Step, keys: Any, values: Any, weights: list[Any]
    ) -> tuple[Any, Any, Any]:
        """Return the layer's hidden state and updated caches; ``weights`` in the order of ``names(plan)``."""
        f, w = self.ops.f, dict(zip(names(plan), weights, strict=True))
        normed = self._norm(plan, "input_norm", hidden, w)
        attended, keys, values = self._attention(plan, normed, step, keys, values, w)
        hidden = f.add(hidden, attended)
        normed = self._norm(plan, "mlp_norm", hidden, w)
        return f.add(hidden, self._mlp(plan, normed, w)), keys, values

    def _norm(self, plan: LayerPlan, name: str, hidden: Any, w: dict[str, Any]) -> Any:
        """Return what a norm's readers take: its result, or the hidden state if their kernels apply the norm."""
        if name in plan.fused:
            return hidden
        return self.ops.norm(hidden, w[name], self.architecture.epsilon, dim=2 if self.bsh else 0)

    def _epsilon(self, plan: LayerPlan, name: str) -> float:
        """Return the epsilon with which a linear's kernel normalises its input; 0 if it does not."""
        return self.architecture.epsilon if plan.norm_of(name) else 0.0

    def _attention(
        self, plan: LayerPlan, normed: Any, step: Step, keys: Any, values: Any, w: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        ops, x = self.ops, self._flat(normed)
        query, key, value = (self._heads(self._linear(plan, name, x, w), normed) for name in ("q", "k", "v"))
        if plan.qk_norm:
            query, key = self._norm_heads(query, w["q_norm"]), self._norm_heads(key, w["k_norm"])
        query, key = ops.rotate(query, key, step.positions)
        query = ops.scale(query, self.architecture.head)
        if step.active_mask is None:
            context = ops.combine(ops.mask(ops.score(query, key), step.mask), value)
        else:
            prior = ops.mask(ops.score(query, keys), step.mask)
            active = ops.mask(ops.score(query, key), step.active_mask)
            context = ops.context(prior, active, values, value)
        if step.active_mask is None and list(keys.sizes) == list(key.sizes):
            keys, values = key, value  # this prefill graph covers the complete cache
        else:
            keys, values = ops.update(keys, values, step.cache_ids, key, value, step.start_ids)
        out = self._linear(plan, "o", self._join(context), w)
        return ops.f.reshape(out, list(normed.sizes)), keys, values

    def _mlp(self, plan: LayerPlan, normed: Any, w: dict[str, Any]) -> Any:
        ops, x = self.ops, self._flat(normed)
        ranks, outputs = plan.mlp, plan["down"].outputs
        if ranks is not None:
            shared, before_b = plan.a_of("gate") == plan.a_of("up"), self._sums_before_b(plan, "down", x)
            hidden, epsilon = plan["gate"].inputs, self._epsilon(plan, "gate")
            kernel = kernels.low_rank_swiglu(hidden, ranks, shared, before_b, self.settings.layout, epsilon)
            up_a, down_b = ([] if shared else [plan.a_of("up")]), ([] if before_b else ["down.B"])
            factors = [plan.a_of("gate"), "gate.B", *up_a, "up.B", "down.A", *down_b]
            y = self._call(kernel, x, [w[factor] for factor in factors], ranks.down if before_b else outputs)
            y = self._sum_over_cores(plan, "down", y, w, before_b)
        else:
            act = ops.f.multiply(ops.silu(self._linear(plan, "gate", x, w)), self._linear(plan, "up", x, w))
            y = self._linear(plan, "down", act, w)
        return ops.f.reshape(y, list(normed.sizes))

    def _linear(self, plan: LayerPlan, name: str, x: Any, w: dict[str, Any]) -> Any:
        """Apply one linear; every core gets the complete result."""
        linear, layout, split = plan[name], self.settings.layout, name in BY_INPUT
        if linear.rank is None:
            y = self._dot(w[f"{name}.W"], x)
            return self._sum_over_cores(plan, name, y, w) if split else self._add_bias(y, w.get(f"{name}.bias"))
        if split:
            before_b = self._sums_before_b(plan, name, x)
            if before_b:
                kernel, outputs = kernels.packed_linear(linear.inputs, linear.rank, layout), linear.rank
            else:
                kernel = kernels.low_rank_linear(linear.inputs, linear.rank, linear.outputs, False, layout)
                outputs = linear.outputs
            factors = [w[f"{name}.A"], *([] if before_b else [w[f"{name}.B"]])]
            y = self._call(kernel, x, factors, outputs)
            return self._sum_over_cores(plan, name, y, w, before_b)
        sizes, epsilon = (linear.inputs, linear.rank, linear.outputs), self._epsilon(plan, name)
        kernel = kernels.low_rank_linear(*sizes, linear.bias, layout, epsilon)
        factors = [w[plan.a_of(name)], w[f"{name}.B"], *([w[f"{name}.bias"]] if linear.bias else [])]
        return self._call(kernel, x, factors, linear.outputs)

    def _sums_before_b(self, plan: LayerPlan, name: str, x: Any) -> bool:
        """Return whether a linear that is split by input is summed over the cores before its B.

        A pivoted one is summed after B, because its rank has another order on every core.
        """
        linear, cores = plan[name], self.settings.tp_degree
        assert linear.rank is not None
        if cores == 1 or name in plan.pivoted:
            return False
        tokens, element = x.sizes[0 if self.bsh else 1], self.settings.dtype.itemsize
        return sums_before_b(linear.rank, linear.outputs, tokens, element, cores)

    def _sum_over_cores(self, plan: LayerPlan, name: str, y: Any, w: dict[str, Any], before_b: bool = False) -> Any:
        """Sum the cores' parts, apply B to the sum if the parts are ``before_b``, and add the bias."""
        y, linear = self.ops.all_reduce(y), plan[name]
        if before_b:
            assert linear.rank is not None
            kernel = kernels.packed_linear(linear.rank, linear.outputs, self.settings.layout)
            y = self._call(kernel, y, [w[f"{name}.B"]], linear.outputs)
        return self._add_bias(y, w.get(f"{name}.bias"))

    def _add_bias(self, y: Any, bias: Any) -> Any:
        f = self.ops.f
        return y if bias is None else f.add(y, f.broadcast(bias, y.sizes, [1 if self.bsh else 0]))

    def _call(self, kernel: Callable[..., None], x: Any, weights: list[Any], outputs: int) -> Any:
        shape = (x.sizes[0], outputs) if self.bsh else (outputs, x.sizes[1])
        return self.ops.nki_call(kernel, x, *weights, output_HloShapes=[x.dtype[shape]])

    def _dot(self, weight: Any, x: Any) -> Any:
        """Multiply by a dense weight [in, out]."""
        if not self.bsh:
            return self.ops.f.dot00(weight, x)
        dims = {"lhs_contracting_dimensions": [1], "rhs_contracting_dimensions": [0]}
        return self.ops.f.dot_general(x, weight, dimension_numbers=dims)

    def _flat(self, hidden: Any) -> Any:
        """Merge sequence and batch of the hidden state into one dimension."""
        first, second, third = hidden.sizes
        return self.ops.f.reshape(hidden, [first * second, third] if self.bsh else [first, second * third])

    def _heads(self, y: Any, like: Any) -> Any:
        """Reshape a linear's result to [sequence, batch, heads, size]; ``like``: the hidden state."""
        f, size = self.ops.f, self.architecture.head
        first, sequence, last = like.sizes
        if self.bsh:
            return f.transpose(f.reshape(y, [first, sequence, y.sizes[1] // size, size]), 0, 1)
        return f.reshape(f.transpose(y, 0, 1), [sequence, last, y.sizes[0] // size, size])

    def _join(self, context: Any) -> Any:
        """Invert :meth:`_heads`."""
        f = self.ops.f
        sequence, batch, heads, size = context.sizes
        flat = [sequence * batch, heads * size]
        if self.bsh:
            return f.reshape(f.transpose(context, 0, 1), flat)
        return f.transpose(f.reshape(context, flat), 0, 1)

    def _norm_heads(self, x: Any, weight: Any) -> Any:
        """Apply RMSNorm over the head size."""
        f, sizes = self.ops.f, list(x.sizes)
        flat = f.reshape(x, [sizes[0] * sizes[1], sizes[2], sizes[3]])
        return f.reshape(self.ops.norm(flat, weight, self.architecture.epsilon, dim=2), sizes)


def sums_before_b(rank: int, outputs: int, tokens: int, element: int, cores: int, core: NeuronCore = TRN1) -> bool:
    """Return whether it is cheaper to sum a linear that is split by input over the cores before its B.

    Dimensions: each core has ``A x`` [rank, tokens] of its part of the input; ``element`` is bytes per number.

    After B: one kernel applies A and B, and the all-reduce sums [outputs, tokens]. Before B: the all-reduce sums the
    smaller [rank, tokens], and a second kernel loads the sum and applies B. A ring all-reduce moves
    ``2 (cores - 1) / cores`` times its bytes. Its rate per core is not published: the model assumes the rate of the DMA
    engines, and one transfer's start each for the store and the load between the kernels.
    """
    row_bytes = tokens * element
    saved = 2 * (cores - 1) / cores * (outputs - rank) * row_bytes
    added = 2 * rank * row_bytes + 2 * core.dma_start_ns * core.dma_rate
    return saved > added
