"""Helpers for one decoder layer: run it in batches, collect moments, and replace linears by low-rank modules."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from neuronmm.compression.factorize import Factors
from neuronmm.compression.moments import Moments, gathering
from neuronmm.compression.ranks import Linear
from neuronmm.compression.stream import weighing
from neuronmm.compression.streaming import run_layer
from neuronmm.models.lowrank import LowRankLinear

BATCH_TOKENS = 2048  # calibration tokens per forward pass of a layer

Rotary = tuple[Tensor, Tensor]


def advance(layer: nn.Module, hidden: Tensor, rotary: Rotary) -> Tensor:
    """Return the layer's outputs [rows, length, hidden] for its inputs ``hidden`` of the same shape."""
    return torch.cat([run_layer(layer, batch, rotary) for batch in batches(hidden)])


def batches(hidden: Tensor) -> tuple[Tensor, ...]:
    """Split rows into groups of about BATCH_TOKENS tokens."""
    return hidden.split(max(1, BATCH_TOKENS // hidden.shape[1]))


def unshared(layer: nn.Module) -> nn.Module:
    """Copy a layer without the weights of its linears, so that linears can be replaced and norms trained."""
    kept = [parameter for name, parameter in layer.named_parameters() if "norm" not in name]
    return copy.deepcopy(layer, {id(parameter): parameter for parameter in kept})


def swap(layer: nn.Module, linear: Linear, factors: Factors, inside: str, dtype: torch.dtype) -> None:
    """Replace the parts of ``linear`` by low-rank modules, with float32 values rounded to ``dtype``.

    ``inside`` is the layer's name, the prefix of the linears' names.
    """
    leader: LowRankLinear | None = None
    row = 0
    for part, scale in linear.scaled_parts:
        name = part.name.removeprefix(inside)
        dense = layer.get_submodule(name)
        assert isinstance(dense, nn.Linear)
        made = LowRankLinear(
            part.in_features,
            part.out_features,
            len(factors.A),
            dense.bias is not None,
            device=torch.device("meta"),
            leader=leader,
        )
        if leader is None:
            made.A.weight = _parameter(factors.A, dtype)
            leader = made
        made.B.weight = _parameter(factors.B[row : row + part.out_features] / scale, dtype)
        made.B.bias = dense.bias
        row += part.out_features
        layer.set_submodule(name, made)


def _parameter(factor: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(factor.to(dtype).float(), requires_grad=False)


def weight_of(layer: nn.Module, linear: Linear, inside: str) -> Tensor:
    """Return the weight of ``linear`` [out, in]; the scaled weights of several parts are concatenated."""
    return torch.cat(
        [scale * layer.get_parameter(f"{part.name.removeprefix(inside)}.weight") for part, scale in linear.scaled_parts]
    )


def moments_of(
    layer: nn.Module, hidden: Tensor, rotary: Rotary, names: Sequence[str], damping: float
) -> tuple[dict[str, Moments], Tensor]:
    """Return the moments of the named linears of the layer, by name, and the layer's outputs."""
    with gathering(layer, names, damping) as moments, weighing(layer) as shares:
        outputs = advance(layer, hidden, rotary)
    for name, one in moments.items():
        one.share = shares[name.partition(".")[0]]
    return moments, outputs
