"""A decoder layer's weights as the graph takes them: a flat list of parameters, each one tensor a rank.

Query, key, value, gate and up are split by output, o and down by input; the factor that has no split dimension is
the same on every rank. A dense linear is one matrix [in, out]; a factorised one is its two factors, packed for the
kernels (:func:`neuronmm.kernels.nki.layout.pack`) after the split. Where all linears that read a norm's result are
factorised, their kernels normalise the hidden state themselves, and the norm's weight is packed into their A.
:func:`names` gives the order, for both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuronmm.kernels.nki.layout import pack
from neuronmm.models.errors import UserError
from neuronmm.models.families import LINEARS
from neuronmm.models.neuronx.checkpoint import Checkpoint, layer_name
from neuronmm.models.neuronx.heads import HeadPlan, distribute, take_heads

NORMS = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
READERS = {"input_norm": ("q", "k", "v"), "mlp_norm": ("gate", "up")}
"""A norm of the hidden state -> the linears that read its result."""
BY_INPUT = ("o", "down")
"""Linears that are split by input: their ranks' results have to be added up."""


@dataclass(frozen=True)
class LinearPlan:
    """One linear on one rank: its sizes there, its factors' rank (None: dense), whether it has a bias.

    ``leader``: the linear, by short name, whose A it uses instead of one of its own.
    """

    inputs: int
    outputs: int
    rank: int | None
    bias: bool
    leader: str | None


@dataclass(frozen=True)
class LayerPlan:
    """What is static about a layer: its linears by short name, whether queries and keys are normalised, and which
    norms of the hidden state the kernels apply."""

    linears: tuple[tuple[str, LinearPlan], ...]
    qk_norm: bool
    fused: tuple[str, ...]

    def __getitem__(self, name: str) -> LinearPlan:
        return dict(self.linears)[name]

    def a_of(self, name: str) -> str:
        """The parameter that is the A of a factorised linear."""
        return f"{self[name].leader or name}.A"

    def norm_of(self, name: str) -> str | None:
        """The norm that a linear's kernel applies to its input."""
        return next((norm for norm in self.fused if name in READERS[norm]), None)


def names(plan: LayerPlan) -> list[str]:
    """The layer's parameters in the order they are handed to the host and come back in the graph."""
    found = [name for name in NORMS if name not in plan.fused and (plan.qk_norm or name in READERS)]
    for name, linear in plan.linears:
        own_a = [] if linear.leader else [f"{name}.A"]
        found += [f"{name}.W"] if linear.rank is None else [*own_a, f"{name}.B"]
        found += [f"{name}.bias"] if linear.bias else []
    return found


class Shards:
    """A checkpoint cut for ``ranks`` NeuronCores.

    Raises:
        UserError: the model cannot be cut into that many parts.
    """

    def __init__(self, checkpoint: Checkpoint, ranks: int) -> None:
        found = checkpoint.architecture
        if not 1 <= ranks <= found.heads:
            raise UserError(f"tp_degree {ranks}: has to lie between 1 and the model's {found.heads} attention heads")
        if found.intermediate % ranks:
            raise UserError(
                f"tp_degree {ranks} does not divide the intermediate size {found.intermediate} of {checkpoint.folder}; "
                f"choose one that does"
            )
        self.checkpoint, self.ranks = checkpoint, ranks
        self.heads: HeadPlan = distribute(found.heads, found.kv_heads, ranks)
        self.plans = [self._plan(index) for index in range(found.layers)]

    def layer(self, index: int) -> list[list[Tensor]]:
        """The layer's parameters in the order of :func:`names`, each a list of one tensor a rank."""
        found = self.checkpoint
        made: dict[str, list[Tensor]] = {}
        for name, part in NORMS.items():
            full = layer_name(index, f"{part}.weight")
            if found.holds(full):
                made[name] = [found.tensor(full)] * self.ranks
        for name, linear in self.plans[index].linears:
            full = layer_name(index, LINEARS[name])
            if linear.rank is None:
                made[f"{name}.W"] = [shard.T.contiguous() for shard in self._cut(name, found.tensor(f"{full}.weight"))]
            else:
                for factor, split in (("A", name in BY_INPUT), ("B", name not in BY_INPUT)):
                    if factor == "B" or linear.leader is None:
                        weight = found.tensor(f"{full}.{factor}.weight")
                        parts = self._cut(name, weight) if split else [weight]
                        norm = self.plans[index].norm_of(name) if factor == "A" else None
                        scale = made[norm][0] if norm else None
                        packed = [pack(part, scale) for part in parts]
                        made[f"{name}.{factor}"] = packed if split else packed * self.ranks
            if linear.bias:
                bias = found.tensor(self._bias(index, name))
                made[f"{name}.bias"] = [bias] * self.ranks if name in BY_INPUT else self._cut(name, bias)
        return [made[name] for name in names(self.plans[index])]

    def _cut(self, name: str, weight: Tensor) -> list[Tensor]:
        """The ranks' parts of a weight or factor [out, in] or a bias [out] along the dimension that is split."""
        dim = 1 if name in BY_INPUT else 0
        if name in ("gate", "up", "down"):
            return [part.contiguous() for part in weight.chunk(self.ranks, dim)]
        heads = self.heads.keys if name in ("k", "v") else self.heads.queries
        return [take_heads(weight, mine, self.checkpoint.architecture.head, dim) for mine in heads]

    def _bias(self, index: int, name: str) -> str:
        """Where the linear's bias is, if it has one."""
        full = layer_name(index, LINEARS[name])
        return f"{full}.B.bias" if full in self.checkpoint.ranks else f"{full}.bias"

    def _plan(self, index: int) -> LayerPlan:
        found = self.checkpoint.architecture
        queries, keys = self.heads.queries_per_rank * found.head, self.heads.keys_per_rank * found.head
        wide = found.intermediate // self.ranks
        sizes = {
            "q": (found.hidden, queries),
            "k": (found.hidden, keys),
            "v": (found.hidden, keys),
            "o": (queries, found.hidden),
            "gate": (found.hidden, wide),
            "up": (found.hidden, wide),
            "down": (wide, found.hidden),
        }
        linears = []
        for name, (inputs, outputs) in sizes.items():
            full = layer_name(index, LINEARS[name])
            leader = self.checkpoint.shared.get(full)
            short = next((n for n, part in LINEARS.items() if leader == layer_name(index, part)), None)
            bias = self.checkpoint.holds(self._bias(index, name))
            linears.append((name, LinearPlan(inputs, outputs, self.checkpoint.ranks.get(full), bias, short)))
        ranks = {name: linear.rank for name, linear in linears}
        fused = [norm for norm, readers in READERS.items() if all(ranks[reader] for reader in readers)]
        if self.checkpoint.dtype is torch.float16:  # squares of a hidden state do not fit it
            fused = []
        qk_norm = self.checkpoint.holds(layer_name(index, f"{NORMS['q_norm']}.weight"))
        return LayerPlan(tuple(linears), qk_norm, tuple(fused))


def fill(decoder: Any, shards: Shards, to_cores: Callable[[list[Tensor]], Any]) -> None:
    """Give a host's decoder its layers, final norm and head, and put them on the cores.

    ``to_cores`` is the host's own: from one tensor a core to a parameter.
    """
    checkpoint = shards.checkpoint
    for index in range(checkpoint.architecture.layers):
        layer = decoder.new_layer()
        layer.n_kv_head = shards.heads.keys_per_rank * shards.ranks
        layer.extra_parameters = [to_cores(parts) for parts in shards.layer(index)]
        layer.init_caches()
    decoder.add_final_layer_norm(checkpoint.final_norm(), None)
    decoder.add_lm_head(checkpoint.output().T)
    decoder.to_neuron()
