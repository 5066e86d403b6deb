"""A compressed checkpoint in a model of vllm-neuron (1.0 and later): low-rank MLPs, and the weights of all the rest.

vllm-neuron builds its Llama and Qwen3 without weights and then calls ``load_weights``. The function here takes its
place: it puts a :class:`Mlp` where a layer's MLP is factorised, and fills the host's own parameters by the loaders that
the host attached to them, which know how it shards them. q, k, v and o stay in the host's attention kernels, which take
matrices: factorised ones are multiplied out. Nothing here imports vllm-neuron; what it needs of it is given.

**Not run in vllm-neuron**, whose package is on AWS's index only. Source of the contract: public copies of its
``model/llama3/model.py``, ``model/qwen3/model.py``, ``utils/weight_loader.py`` and ``functional/mlp.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from neuronmm.kernels.hardware import TRN2
from neuronmm.kernels.nki.layout import Packing, unpacked
from neuronmm.models.errors import UserError
from neuronmm.models.neuronx.checkpoint import Checkpoint
from neuronmm.models.neuronx.intermediate import MLP
from neuronmm.models.neuronx.weights import LayerPlan, Shards

Loader = Any
"""vllm-neuron's ``SafetensorsWeightLoader``: ``load(slices, rank)`` returns the parameter of a rank."""
Launcher = Callable[[Any], Any]
"""vllm-neuron's way to launch a kernel: from a kernel function to ``kernel[cores](...)``."""


class Mlp(nn.Module):
    """The MLP of a decoder layer, with the arguments, the result and the collectives of vllm-neuron's own.

    ``host``: the MLP that it replaces. ``weights``: the rank's parameters, by the names of :func:`.weights.names`.
    ``launcher``: with it the NKI kernels compute, on packed factors; None: torch, on factors that are not packed.
    """

    def __init__(
        self, host: nn.Module, plan: LayerPlan, weights: Mapping[str, Tensor], launcher: Launcher | None
    ) -> None:
        super().__init__()
        self.tp_group: Any = host.tp_group
        self.sum_group: Any = sum_group(host)
        self.plan = plan
        self.fused, self.calls = _kernels(plan, launcher) if launcher else (None, {})
        for name, weight in weights.items():
            self.register_parameter(_attribute(name), nn.Parameter(weight, requires_grad=False))

    def forward(self, hidden_states: Tensor, is_prefill: bool) -> Tensor:
        """Return down(silu(gate(x)) * up(x)), [tokens, hidden].

        In a prefill a rank has and returns its part of the tokens; in decode it has them all.
        """
        parallel = self.tp_group.world_size > 1
        if is_prefill and parallel:
            hidden_states = self.tp_group.all_gather(hidden_states, dim=0)
        y = self._of_rank(hidden_states)
        if is_prefill:
            return self.tp_group.reduce_scatter(y, dim=0) if parallel else y
        if self.sum_group.world_size > 1:
            self.sum_group.all_reduce(y)  # in place, as the host's MLPs use it
        return y

    def _of_rank(self, x: Tensor) -> Tensor:
        """Return what the rank's part of the intermediate dimension adds to the output."""
        if self.fused is None:
            return self._linear("down", silu(self._linear("gate", x)) * self._linear("up", x))
        shared = self.plan.a_of("gate") == self.plan.a_of("up")
        names = [self.plan.a_of("gate"), "gate.B", *([] if shared else ["up.A"]), "up.B", "down.A", "down.B"]
        return self.fused(x, *[self._weight(name) for name in names])

    def _linear(self, name: str, x: Tensor) -> Tensor:
        if self.plan[name].rank is None:
            return x @ self._weight(f"{name}.W")
        A, B = self._weight(self.plan.a_of(name)), self._weight(f"{name}.B")
        return self.calls[name](x, A, B) if name in self.calls else x @ A.T @ B.T

    def _weight(self, name: str) -> Tensor:
        return self.get_parameter(_attribute(name))


def _kernels(plan: LayerPlan, launcher: Launcher) -> tuple[Callable[..., Tensor] | None, dict[str, Any]]:
    """Return the kernel of the whole MLP, or None and the kernels of its factorised linears."""
    from neuronmm.models.neuronx import nki_calls  # it needs nki, which a machine without a device may not have

    if plan.mlp is not None:
        return nki_calls.mlp(plan.mlp, plan.a_of("gate") == plan.a_of("up"), TRN2, launcher), {}
    ranks = {name: plan[name].rank for name in MLP}
    return None, {name: nki_calls.linear(rank, False, TRN2, launcher) for name, rank in ranks.items() if rank}


def load_weights(
    model: Any,
    folder: Path,
    device: torch.device,
    loader_of: Callable[[nn.Parameter], Loader],
    launcher: Launcher | None,
) -> None:
    """Install the low-rank MLPs in a model of vllm-neuron, and load the weights of this rank.

    Args:
        model: a Llama or Qwen3 of vllm-neuron, without weights.
        folder: the compressed checkpoint.
        device: where the weights go.
        loader_of: vllm-neuron's ``get_weight_loader``.
        launcher: as for :class:`Mlp`.

    Raises:
        UserError: the checkpoint is damaged, or vllm-neuron's models cannot run it.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: not a folder; download the compressed checkpoint and name its folder")
    checkpoint = Checkpoint(folder, model.config.torch_dtype)
    group = sum_group(model.model.layers[0].mlp)
    whole = Shards(checkpoint, group.world_size, distribution=None, fuses_norms=False)
    for index, (layer, plan) in enumerate(zip(model.model.layers, whole.plans, strict=True)):
        if any(linear.bias for _, linear in plan.linears):
            raise UserError(f"{folder}: layer {index} has biases, which vllm-neuron's models do not have")
        if any(plan[name].rank for name in MLP):
            weights = _mlp_weights(whole, index, group.rank_in_group, packed=launcher is not None)
            layer.mlp = Mlp(layer.mlp, plan, {name: part.to(device) for name, part in weights.items()}, launcher)
    filled = {id(own) for module in model.modules() if isinstance(module, Mlp) for own in module.parameters()}
    state = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in filled:
            slices = [Slice(tensor) for tensor in sources(checkpoint, name)]
            state[name] = loader_of(parameter).load(slices, model.rank).to(device, parameter.dtype)
    model.load_state_dict(state, strict=False, assign=True)


def sum_group(mlp: Any) -> Any:
    """Return the group of ranks among which the host splits an MLP's intermediate dimension."""
    return getattr(mlp, "mlp_tp_group", mlp.tp_group)


class Slice:
    """A tensor with the interface of safetensors' slices, which the host's loaders read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        """Return the sizes of the tensor."""
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]


def sources(checkpoint: Checkpoint, parameter: str) -> list[Tensor]:
    """Read the tensors from which vllm-neuron makes one of its parameters, factorised linears multiplied out."""
    module, _, name = parameter.rpartition(".")
    if name == "qkv_proj_weight":
        return [checkpoint.weight(f"{module}.{part}_proj") for part in "qkv"]
    if name.endswith("_proj_weight"):
        return [checkpoint.weight(f"{module}.{name.removesuffix('_weight')}")]
    return [checkpoint.output() if parameter == "lm_head.weight" else checkpoint.tensor(parameter)]


def _mlp_weights(whole: Shards, index: int, rank: int, packed: bool) -> dict[str, Tensor]:
    """Read a rank's weights of one MLP: factors packed for the kernels, or [rank, in] and [out, rank]."""
    plan, bytes_each = whole.plans[index], whole.checkpoint.dtype.itemsize
    packings, found = plan.packings(bytes_each), {}
    for name, (part,) in whole.parts(index, only=MLP, core=rank).items():
        short, _, kind = name.partition(".")
        if short not in MLP:
            continue  # a norm, which stays the host's
        if kind != "W" and not packed:
            linear = plan[short]
            assert linear.rank is not None  # it has factors
            rows, columns = (linear.inputs, linear.rank) if kind == "A" else (linear.rank, linear.outputs)
            packing = packings.get(name) or Packing.of(rows, columns, bytes_each)
            part = unpacked(packing.factor(part))
        found[name] = part
    return found


def _attribute(name: str) -> str:
    return name.replace(".", "_")
