"""A compressed checkpoint as NxD Inference loads it: names, shapes and values of the plugin's parameters.

The plugin replaces a group of a layer's linears (q, k and v; o; the MLP) if one of them is factorised; all others stay
NxD's own. Its parameters are those of :mod:`.weights`, packed for the kernels. NxD shards a checkpoint by cutting each
parameter evenly along dimension 0, so a parameter with one tensor per core is their concatenation. Nothing here imports
NxD.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from neuronmm.kernels.nki.layout import Packing
from neuronmm.models.errors import UserError
from neuronmm.models.families import LINEARS
from neuronmm.models.neuronx.checkpoint import Checkpoint
from neuronmm.models.neuronx.heads import distribute_as_nxd
from neuronmm.models.neuronx.settings import Settings
from neuronmm.models.neuronx.weights import BY_INPUT, LayerPlan, Shards

GROUPS = (("q", "k", "v"), ("o",), ("gate", "up", "down"))
PATHS = {
    **{name: f"self_attn.qkv_proj.{name}_proj" for name in "qkv"},
    "o": "self_attn.o_proj",
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
"""Linear -> where NxD's decoder layer has the module that the plugin puts in its place."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a linear. ``shape``: on one core. ``split``: every core has its own part."""

    shape: tuple[int, ...]
    split: bool


def split(checkpoint: Checkpoint, settings: Settings, emulated: bool) -> Shards:
    """Split a checkpoint for NxD's modules; ``emulated``: they run in NxD's CPU mode.

    Raises:
        UserError: NxD cannot run the model so.
    """
    architecture = checkpoint.architecture
    where = f"{checkpoint.folder / 'config.json'}: NxD Inference"
    if architecture.model_type != "llama" and architecture.rope_scaling:
        raise UserError(f"{where} has no rope scaling for {architecture.model_type}; use another Neuron host")
    if architecture.model_type == "qwen2" and architecture.head * architecture.heads != architecture.hidden:
        raise UserError(f"{where} takes a Qwen2 with heads of hidden size / heads only; use another Neuron host")
    if emulated and settings.dtype is torch.float16:
        raise UserError("NxD Inference's CPU mode has no float16; emulate with --dtype fp32 or bf16")
    if emulated and settings.dtype is torch.bfloat16 and settings.tp_degree > 1:
        raise UserError("NxD Inference's CPU mode runs bfloat16 on 1 core only; emulate with --dtype fp32, or --tp 1")
    return shards(checkpoint, settings.tp_degree)


def shards(checkpoint: Checkpoint, tp_degree: int) -> Shards:
    """Split a checkpoint over the cores as NxD spreads the heads; its own norms normalise the inputs."""
    return Shards(checkpoint, tp_degree, distribute_as_nxd, fuses_norms=False)


def replaced(plan: LayerPlan) -> tuple[str, ...]:
    """Return the linears of a layer that the plugin computes, dense ones of their groups included."""
    return tuple(
        name for group in GROUPS if any(plan[one].rank or plan[one].expanded for one in group) for name in group
    )


def parameters(plan: LayerPlan, name: str, element_bytes: int) -> dict[str, Parameter]:
    """Return the parameters of one linear: W, or A (unless another linear has it) and B, and the bias if it has one."""
    linear, found = plan[name], {}
    by_input = name in BY_INPUT
    if linear.rank is None:
        found["W"] = Parameter((linear.inputs, linear.outputs), True)
    else:
        own_order = name in ("gate", "up", "down") and bool(plan.pivoted)  # each core has its own order of the rank
        packings = plan.packings(element_bytes)
        sizes = {"A": (linear.inputs, linear.rank), "B": (linear.rank, linear.outputs)}
        for factor, size in sizes.items():
            if factor == "A" and linear.leader:
                continue
            packing = packings.get(f"{name}.{factor}") or Packing.of(*size, element_bytes)
            found[factor] = Parameter((packing.elements,), own_order or (factor == "A") == by_input)
    if linear.bias:
        found["bias"] = Parameter((linear.outputs,), not by_input)
    return found


def convert(state: dict[str, Tensor], whole: Shards) -> dict[str, Tensor]:
    """Replace the weights of the replaced linears in NxD's state dict by the plugin's parameters.

    ``state``: names without the prefix "model.", as NxD's ``convert_hf_to_neuron_state_dict`` takes and returns them.

    Raises:
        UserError: the checkpoint lacks a tensor, or a tensor contains NaN or infinity.
    """
    gone = tuple(
        f"layers.{index}.{LINEARS[name]}." for index, plan in enumerate(whole.plans) for name in replaced(plan)
    )
    state = {name: tensor for name, tensor in state.items() if not name.startswith(gone)}
    for index, plan in enumerate(whole.plans):
        if not replaced(plan):
            continue
        parts = whole.parts(index)
        for name in replaced(plan):
            for kind in parameters(plan, name, whole.checkpoint.dtype.itemsize):
                tensors = parts[f"{name}.{kind}"]
                state[f"layers.{index}.{PATHS[name]}.{kind}"] = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    return state
