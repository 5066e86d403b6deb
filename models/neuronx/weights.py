"""A decoder layer's weights as the graph takes them: a flat list of parameters, each with one tensor per core.

q, k, v, gate and up are split by output, o and down by input. Every core has the factor without a split dimension. A
dense linear is one matrix [in, out]. A factorised linear is its two factors, split and then packed for the
kernels (:func:`neuronmm.kernels.nki.layout.pack`). If all linears that read a norm's result are factorised, their
kernels normalise the hidden state themselves, and the norm's weight is packed into their A. :func:`names` defines the
order of the parameters.

An MLP that one kernel computes keeps gate and up in the row form and down in the column form. On several cores each has
its own order of the intermediate dimension and of the ranks (:mod:`.intermediate`), so that the factor without a split
dimension has another order on every core. All other linears in a pivoted form are expanded to two factors, or to the
matrix where that has fewer weights (:mod:`.expansion`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuronmm.kernels.nki.forms import mlp_packings
from neuronmm.kernels.nki.layout import Packing, pack
from neuronmm.kernels.nki.problem import Ranks
from neuronmm.models.errors import UserError
from neuronmm.models.families import LINEARS
from neuronmm.models.neuronx.checkpoint import Checkpoint, layer_name
from neuronmm.models.neuronx.expansion import low_rank
from neuronmm.models.neuronx.heads import HeadPlan, distribute, take_heads
from neuronmm.models.neuronx.intermediate import MLP, Split, split_mlp

NORMS = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
READERS = {"input_norm": ("q", "k", "v"), "mlp_norm": ("gate", "up")}
"""A norm of the hidden state -> the linears that read its result."""
BY_INPUT = ("o", "down")
"""Linears that are split by input: the results of the cores must be summed."""


@dataclass(frozen=True)
class LinearPlan:
    """One linear on one core: its sizes there, its rank (None: dense), and whether it has a bias.

    ``leader``: short name of the linear whose A it shares; None if it has its own A. ``expanded``: it is dense here and
    factorised in the checkpoint.
    """

    inputs: int
    outputs: int
    rank: int | None
    bias: bool
    leader: str | None
    expanded: bool


@dataclass(frozen=True)
class LayerPlan:
    """The static part of a layer.

    ``linears``: by short name. ``qk_norm``: queries and keys are normalised. ``fused``: the norms of the hidden state
    that the kernels apply. ``mlp``: sizes and pivots of the MLP if one kernel computes it, else None.
    """

    linears: tuple[tuple[str, LinearPlan], ...]
    qk_norm: bool
    fused: tuple[str, ...]
    mlp: Ranks | None

    def __getitem__(self, name: str) -> LinearPlan:
        return dict(self.linears)[name]

    def a_of(self, name: str) -> str:
        """Return the name of the parameter with the A of a factorised linear."""
        return f"{self[name].leader or name}.A"

    @property
    def pivoted(self) -> tuple[str, ...]:
        """The linears that keep their pivoted form."""
        if self.mlp is None:
            return ()
        return tuple(name for name, pivots in zip(MLP, self.mlp.pivots, strict=True) if pivots)

    def packings(self, element_bytes: int) -> dict[str, Packing]:
        """Return how the factors of an MLP with pivots are packed, by the names of the parameters."""
        if self.mlp is None or not self.pivoted:
            return {}
        factors = [f"{name}.{factor}" for name in MLP for factor in "AB"]
        shared = self.a_of("gate") == self.a_of("up")
        return dict(zip(factors, mlp_packings(self["gate"].inputs, self.mlp, shared, element_bytes), strict=True))

    def norm_of(self, name: str) -> str | None:
        """Return the norm that a linear's kernel applies to its input, or None."""
        return next((norm for norm in self.fused if name in READERS[norm]), None)


def names(plan: LayerPlan) -> list[str]:
    """Return the names of the layer's parameters, in the order in which the host gets them and the graph reads them."""
    parameters = [name for name in NORMS if name not in plan.fused and (plan.qk_norm or name in READERS)]
    for name, linear in plan.linears:
        a = [] if linear.leader else [f"{name}.A"]
        parameters += [f"{name}.W"] if linear.rank is None else [*a, f"{name}.B"]
        parameters += [f"{name}.bias"] if linear.bias else []
    return parameters


class Shards:
    """A checkpoint split over ``tp_degree`` NeuronCores.

    ``distribution``: how the host's attention spreads the heads over the cores; None: only the MLPs are split.
    ``fuses_norms``: kernels may normalise their input.

    Raises:
        UserError: the model cannot be split into that many parts.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tp_degree: int,
        distribution: Callable[[int, int, int], HeadPlan] | None = distribute,
        fuses_norms: bool = True,
    ) -> None:
        architecture = checkpoint.architecture
        heads, intermediate = architecture.heads, architecture.intermediate
        if distribution and not 1 <= tp_degree <= heads:
            raise UserError(f"tp_degree {tp_degree}: must be between 1 and the model's {heads} attention heads")
        if intermediate % tp_degree:
            raise UserError(
                f"tp_degree {tp_degree} does not divide the intermediate size {intermediate} of {checkpoint.folder}; "
                f"choose one that does"
            )
        self.checkpoint, self.tp_degree, self.fuses_norms = checkpoint, tp_degree, fuses_norms
        attention = (heads, architecture.kv_heads)
        self.heads = distribution(*attention, tp_degree) if distribution else distribute(*attention, 1)
        self.mlps = [self._mlp(index) for index in range(architecture.layers)]
        self.plans = [self._plan(index) for index in range(architecture.layers)]

    def layer(self, index: int) -> list[list[Tensor]]:
        """Read the layer's parameters in the order of :func:`names`, each a list of one tensor per core."""
        parts = self.parts(index)
        return [parts[name] * (self.tp_degree // len(parts[name])) for name in names(self.plans[index])]

    def parts(
        self, index: int, only: Collection[str] = tuple(LINEARS), core: int | None = None
    ) -> dict[str, list[Tensor]]:
        """Read the layer's parameters: a list of one tensor per core, or of a single one that all cores share.

        ``only``: the linears to read, by short name. ``core``: of what differs by core, the only one to keep and pack.
        """

        def wanted(tensors: list[Tensor]) -> list[Tensor]:
            return tensors if core is None else [tensors[core % len(tensors)]]

        plan, checkpoint = self.plans[index], self.checkpoint
        packings = plan.packings(checkpoint.dtype.itemsize)
        parts: dict[str, list[Tensor]] = {}
        for name, part in NORMS.items():
            full = layer_name(index, f"{part}.weight")
            if checkpoint.has(full):
                parts[name] = [checkpoint.tensor(full)]
        for name, linear in plan.linears:
            if name not in only:
                continue
            full = layer_name(index, LINEARS[name])
            if linear.rank is None:
                weights = wanted(self._split(name, checkpoint.weight(full)))
                parts[f"{name}.W"] = [weight.T.contiguous() for weight in weights]
            else:
                for factor in "AB" if linear.leader is None else "B":
                    norm = plan.norm_of(name) if factor == "A" else None
                    scale = parts[norm][0] if norm else None
                    packing = packings.get(f"{name}.{factor}")
                    parts[f"{name}.{factor}"] = [
                        pack(part, scale, packing) for part in wanted(self._factor(index, name, factor))
                    ]
            if linear.bias:
                bias = checkpoint.tensor(checkpoint.bias(full))
                parts[f"{name}.bias"] = [bias] if name in BY_INPUT else wanted(self._split(name, bias))
        return parts

    def _factor(self, index: int, name: str, factor: str) -> list[Tensor]:
        """Read factor A or B of a linear: one part per core, or a single one that is the same on every core."""
        plan, mlp = self.plans[index], self.mlps[index]
        weight = self.checkpoint.factor(layer_name(index, LINEARS[name]), factor)
        if mlp and plan.pivoted and name in MLP:
            if factor == "A":
                return mlp.parts_of_a(name, weight)
            return mlp.parts_of_b(name, weight, plan[name].leader or name)
        return self._split(name, weight) if (factor == "A") == (name in BY_INPUT) else [weight]

    def _split(self, name: str, weight: Tensor) -> list[Tensor]:
        """Split a weight or factor [out, in], or a bias [out], into one part per core."""
        dim = 1 if name in BY_INPUT else 0
        if name in MLP:
            return [part.contiguous() for part in weight.chunk(self.tp_degree, dim)]
        heads = self.heads.keys if name in ("k", "v") else self.heads.queries
        return [take_heads(weight, assigned, self.checkpoint.architecture.head, dim) for assigned in heads]

    def _plan(self, index: int) -> LayerPlan:
        architecture = self.checkpoint.architecture
        hidden, head = architecture.hidden, architecture.head
        queries, keys = self.heads.queries_per_core * head, self.heads.keys_per_core * head
        intermediate = architecture.intermediate // self.tp_degree
        sizes = {
            "q": (hidden, queries),
            "k": (hidden, keys),
            "v": (hidden, keys),
            "o": (queries, hidden),
            "gate": (hidden, intermediate),
            "up": (hidden, intermediate),
            "down": (intermediate, hidden),
        }
        checkpoint, mlp = self.checkpoint, self.mlps[index]
        low = low_rank(index, architecture.linears, checkpoint.ranks, checkpoint.shared, MLP if mlp else ())
        linears = []
        for name, (inputs, outputs) in sizes.items():
            full = layer_name(index, LINEARS[name])
            bias = checkpoint.has(checkpoint.bias(full))
            expanded = full in checkpoint.ranks and name not in low
            rank, leader = low.get(name, (None, None))
            linears.append((name, LinearPlan(inputs, outputs, rank, bias, leader, expanded)))
        fused = [norm for norm, readers in READERS.items() if all(reader in low for reader in readers)]
        if (
            not self.fuses_norms or checkpoint.dtype is torch.float16
        ):  # which cannot represent the squares of a hidden state
            fused = []
        qk_norm = checkpoint.has(layer_name(index, f"{NORMS['q_norm']}.weight"))
        return LayerPlan(tuple(linears), qk_norm, tuple(fused), mlp.per_core if mlp else None)

    def _mlp(self, index: int) -> Split | None:
        """Split an MLP that one kernel computes, with the pivots that it keeps; None for all others."""
        checkpoint = self.checkpoint
        linears = [layer_name(index, LINEARS[name]) for name in MLP]
        if any(checkpoint.has(checkpoint.bias(linear)) for linear in linears[:2]):
            return None
        middle, cores = checkpoint.architecture.intermediate, self.tp_degree
        return split_mlp(linears, checkpoint.ranks, checkpoint.shared, checkpoint.forms, middle, cores)


def fill(decoder: Any, shards: Shards, to_cores: Callable[[list[Tensor]], Any]) -> None:
    """Add the layers, the final norm and the head to a host's decoder, and load it onto the cores.

    ``to_cores``: the host's function from one tensor per core to a parameter.
    """
    checkpoint = shards.checkpoint
    for index in range(checkpoint.architecture.layers):
        layer = decoder.new_layer()
        layer.n_kv_head = shards.heads.keys_per_core * shards.tp_degree
        layer.extra_parameters = [to_cores(parts) for parts in shards.layer(index)]
        layer.init_caches()
    decoder.add_final_layer_norm(checkpoint.final_norm(), None)
    decoder.add_lm_head(checkpoint.output().T)
    decoder.to_neuron()
