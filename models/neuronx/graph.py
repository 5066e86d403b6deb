"""One decoder layer as a graph, in a host's own graph functions. Nothing here knows which host it is.

Linears take and give [features, tokens], tokens in the order of the host's hidden state [features, sequence, batch]
(its HSB layout); a BSH hidden state is transposed on the way in and out. Attention works on [sequence, batch, heads,
head size], as the hosts' attention functions do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from neuronmm.models.neuronx import kernels
from neuronmm.models.neuronx.architecture import Architecture
from neuronmm.models.neuronx.weights import BY_INPUT, LayerPlan, names


@dataclass(frozen=True)
class GraphOps:
    """A host's graph functions, with what differs from host to host already bound.

    ``f`` is the module of elementary functions (reshape, transpose, dot00, add, ...). ``score(query, key)``,
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
    bsh: bool


@dataclass(frozen=True)
class Step:
    """What the host prepares once for all layers: where the tokens go, their rotations, who may see whom.

    ``active_mask`` is None while a prompt is read.
    """

    cache_ids: Any
    start_ids: Any
    positions: Any
    mask: Any
    active_mask: Any


class LayerGraph:
    """Builds decoder layers on ``ops``."""

    def __init__(self, ops: GraphOps, architecture: Architecture) -> None:
        self.ops, self.architecture = ops, architecture

    def __call__(
        self, plan: LayerPlan, hidden: Any, step: Step, keys: Any, values: Any, weights: list[Any]
    ) -> tuple[Any, Any, Any]:
        """The hidden state after the layer, and its updated caches; ``weights`` in the order of ``names(plan)``."""
        ops, w = self.ops, dict(zip(names(plan), weights, strict=True))
        epsilon, dim = self.architecture.epsilon, 2 if ops.bsh else 0
        normed = ops.norm(hidden, w["input_norm"], epsilon, dim=dim)
        attended, keys, values = self._attention(plan, normed, step, keys, values, w)
        hidden = ops.f.add(hidden, attended)
        normed = ops.norm(hidden, w["mlp_norm"], epsilon, dim=dim)
        return ops.f.add(hidden, self._mlp(plan, normed, w)), keys, values

    def _attention(
        self, plan: LayerPlan, normed: Any, step: Step, keys: Any, values: Any, w: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        ops, x = self.ops, self._columns(normed)
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
            keys, values = key, value  # the prompt's graph covers the whole cache
        else:
            keys, values = ops.update(keys, values, step.cache_ids, key, value, step.start_ids)
        sequence, batch, heads, size = context.sizes
        joined = ops.f.transpose(ops.f.reshape(context, [sequence * batch, heads * size]), 0, 1)
        return self._restore(self._linear(plan, "o", joined, w), normed), keys, values

    def _mlp(self, plan: LayerPlan, normed: Any, w: dict[str, Any]) -> Any:
        ops, x = self.ops, self._columns(normed)
        gate, up, down = (plan[name] for name in ("gate", "up", "down"))
        if gate.rank and up.rank and down.rank and not (gate.bias or up.bias):
            kernel = kernels.low_rank_swiglu(gate.inputs, gate.outputs, gate.rank, up.rank, down.rank)
            factors = [w[f"{name}.{factor}"] for name in ("gate", "up", "down") for factor in "AB"]
            y = self._finish("down", self._call(kernel, x, factors, down.outputs), w)
        else:
            act = ops.f.multiply(ops.silu(self._linear(plan, "gate", x, w)), self._linear(plan, "up", x, w))
            y = self._linear(plan, "down", act, w)
        return self._restore(y, normed)

    def _linear(self, plan: LayerPlan, name: str, x: Any, w: dict[str, Any]) -> Any:
        """One linear, complete on every rank. Dimensions: x [in, tokens] -> [out, tokens]."""
        linear = plan[name]
        if linear.rank is None:
            y = self.ops.f.dot00(w[f"{name}.W"], x)
        else:
            kernel = kernels.low_rank_linear(linear.inputs, linear.rank, linear.outputs)
            y = self._call(kernel, x, [w[f"{name}.A"], w[f"{name}.B"]], linear.outputs)
        return self._finish(name, y, w)

    def _finish(self, name: str, y: Any, w: dict[str, Any]) -> Any:
        """Add the ranks' parts up where the linear is split by input, then its bias."""
        if name in BY_INPUT:
            y = self.ops.all_reduce(y)
        bias = w.get(f"{name}.bias")
        return y if bias is None else self.ops.f.add(y, self.ops.f.broadcast(bias, y.sizes, [0]))

    def _call(self, kernel: Callable[..., None], x: Any, factors: list[Any], outputs: int) -> Any:
        return self.ops.nki_call(kernel, x, *factors, output_HloShapes=[x.dtype[outputs, x.sizes[1]]])

    def _columns(self, hidden: Any) -> Any:
        """The hidden state as [features, tokens]."""
        f = self.ops.f
        features, sequence, batch = (f.transpose210(hidden) if self.ops.bsh else hidden).sizes
        return f.reshape(f.transpose210(hidden) if self.ops.bsh else hidden, [features, sequence * batch])

    def _restore(self, y: Any, like: Any) -> Any:
        """[features, tokens] in the layout of the hidden state ``like``."""
        f, sizes = self.ops.f, list(like.sizes)
        if self.ops.bsh:
            return f.transpose210(f.reshape(y, sizes[::-1]))
        return f.reshape(y, sizes)

    def _heads(self, y: Any, like: Any) -> Any:
        """[heads * size, tokens] -> [sequence, batch, heads, size]."""
        f, size = self.ops.f, self.architecture.head
        first, sequence, last = like.sizes
        batch = first if self.ops.bsh else last
        return f.reshape(f.transpose(y, 0, 1), [sequence, batch, y.sizes[0] // size, size])

    def _norm_heads(self, x: Any, weight: Any) -> Any:
        """RMS norm over the head size."""
        f, sizes = self.ops.f, list(x.sizes)
        flat = f.reshape(x, [sizes[0] * sizes[1], sizes[2], sizes[3]])
        return f.reshape(self.ops.norm(flat, weight, self.architecture.epsilon, dim=2), sizes)
