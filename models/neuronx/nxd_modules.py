"""The modules that take the place of NxD Inference's linears in a decoder layer, and run the kernels.

Hidden states are [batch, sequence, hidden]. NxD's own norms stay. The results of o and down are summed over the cores
after B. It needs NxD Inference and the SDK or its emulation.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import BaseParallelLinear
from neuronx_distributed.parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from torch.nn.functional import silu
from torch_neuronx.utils import get_platform_target

from neuronmm.kernels.hardware import CORES, TRN1, NeuronCore
from neuronmm.models.neuronx import nki_calls
from neuronmm.models.neuronx.nxd_weights import GROUPS, parameters, replaced
from neuronmm.models.neuronx.weights import BY_INPUT, LayerPlan


def target() -> NeuronCore:
    """Return the core of this machine, as NxD names it; Inferentia2 has Trainium 1's."""
    return CORES.get(get_platform_target(), TRN1)


class Linear(BaseParallelLinear):
    """One linear of a layer, factorised or dense: its parameters, and its kernel.

    NxD shards the parameters of this class as it does those of its own parallel linears.
    """

    def __init__(self, plan: LayerPlan, name: str, dtype: torch.dtype, cores: int) -> None:
        super().__init__()
        linear = plan[name]
        self.rank, self.summed = linear.rank, name in BY_INPUT
        self.register_parameter("bias", None)
        for kind, parameter in parameters(plan, name, dtype.itemsize).items():
            weight = nn.Parameter(torch.empty(parameter.shape, dtype=dtype), requires_grad=False)
            if parameter.split:
                set_tensor_model_parallel_attributes(weight, True, 0, 1, num_partitions=cores)
            setattr(self, kind, weight)

    def forward(self, x: Tensor, A: Tensor | None = None) -> Tensor:
        """Return the linear of ``x`` [batch, sequence, in]; ``A``: that of the linear whose A it uses."""
        inside = None if self.summed else self.bias  # added once, after the sum over the cores
        if self.rank is None:
            y = x @ self.W if inside is None else x @ self.W + inside
        else:
            factors = [self.A if A is None else A, self.B, *([] if inside is None else [inside])]
            y = nki_calls.linear(self.rank, inside is not None, target())(x, *factors)
        return self.sum(y) if self.summed else y

    def sum(self, y: Tensor) -> Tensor:
        """Sum the cores' parts and add the bias."""
        y = reduce_from_tensor_model_parallel_region(y)
        return y if self.bias is None else y + self.bias


class Projection(Linear):
    """o, with the arguments of NxD's output projection."""

    def forward(self, x: Tensor, adapter_ids: Any = None) -> Tensor:  # type: ignore[override]
        """Return the output projection of ``x`` [batch, sequence, heads * head size]."""
        return super().forward(x)


class Attention(nn.Module):
    """q, k and v, with the arguments and results of NxD's module for them."""

    def __init__(self, plan: LayerPlan, dtype: torch.dtype, cores: int) -> None:
        super().__init__()
        self.leaders = {name: plan[name].leader for name in GROUPS[0]}
        for name in GROUPS[0]:
            self.add_module(f"{name}_proj", Linear(plan, name, dtype, cores))

    def forward(
        self, hidden_states: Tensor, rmsnorm: Any = None, adapter_ids: Any = None, residual: Tensor | None = None,
        cos_cache: Tensor | None = None, sin_cache: Tensor | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return query, key and value, each [batch, sequence, heads * head size], and the residual."""
        return (*(self._project(name, hidden_states) for name in GROUPS[0]), residual)

    def _project(self, name: str, x: Tensor) -> Tensor:
        leader = self.leaders[name]
        A = self.get_submodule(f"{leader}_proj").A if leader else None
        return self.get_submodule(f"{name}_proj")(x, A)


class Mlp(nn.Module):
    """The MLP, with the arguments and results of NxD's: one kernel if all linears are factorised and fit it."""

    def __init__(self, plan: LayerPlan, dtype: torch.dtype, cores: int) -> None:
        super().__init__()
        self.ranks, self.leader = plan.mlp, plan["up"].leader
        self.follower = plan["gate"].leader
        for name in GROUPS[2]:
            self.add_module(f"{name}_proj", Linear(plan, name, dtype, cores))

    def forward(
        self, x: Tensor, rmsnorm: Any = None, residual: Tensor | None = None, adapter_ids: Any = None
    ) -> tuple[Tensor, None]:
        """Return down(silu(gate(x)) * up(x)), [batch, sequence, hidden], and no residual."""
        linears: list[Any] = [self.get_submodule(f"{name}_proj") for name in GROUPS[2]]
        gate, up, down = linears
        a_gate = up.A if self.follower else getattr(gate, "A", None)
        a_up = gate.A if self.leader else getattr(up, "A", None)
        if self.ranks is None:
            return down(silu(gate(x, a_gate)) * up(x, a_up)), None
        shared = bool(self.leader or self.follower)
        factors = [a_gate, gate.B, *([] if shared else [a_up]), up.B, down.A, down.B]
        return down.sum(nki_calls.mlp(self.ranks, shared, target())(x, *factors)), None


def install(layer: nn.Module, plan: LayerPlan, dtype: torch.dtype, cores: int) -> None:
    """Put the plugin's modules into one of NxD's decoder layers. ``cores``: the tensor-parallel degree."""
    names = replaced(plan)
    attention: Any = layer.self_attn
    if "q" in names:
        attention.qkv_proj = Attention(plan, dtype, cores)
    if "o" in names:
        attention.o_proj = Projection(plan, "o", dtype, cores)
    if "gate" in names:
        layer.mlp = Mlp(plan, dtype, cores)
