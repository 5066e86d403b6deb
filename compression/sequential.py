"""Anchored factors of one decoder layer, linear by linear in execution order, so that each gets compressed inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from neuronmm.compression.anchored import Anchors
from neuronmm.compression.block import Rotary, batches, weight_of
from neuronmm.compression.ranks import Linear
from neuronmm.compression.stream import BETWEEN
from neuronmm.compression.streaming import run_layer
from neuronmm.models.families import STAGES

_HALVES = (STAGES[:2], STAGES[2:])


def anchored_factors(
    dense: nn.Module,
    compressed: nn.Module,
    hidden: tuple[Tensor, Tensor],
    rotary: Rotary,
    linears: list[Linear],
    inside: str,
    damping: float,
    take: Callable[[Linear, Anchors], None],
) -> Tensor:
    """Pass through the layer's linears in execution order; ``take`` puts the factors of each into ``compressed``.

    The target of linears that write to the residual stream is the dense model's stream, not only their own dense
    output. They thus correct earlier errors.

    Args:
        dense: the dense layer.
        compressed: the same layer; linears that are not factorised yet are dense.
        hidden: the inputs of the dense and of the compressed layer, each [rows, length, hidden].
        rotary: RoPE's cos and sin.
        linears: the linears to factorise; those with a shared A count as one.
        inside: the layer's name, the prefix of the linears' names.
        damping: relative to the mean diagonal entry of the Gram matrix.
        take: called with each linear and the sums for its factors.

    Returns:
        The dense layer's outputs [rows, length, hidden].
    """
    run: Callable[[nn.Module, Tensor], Tensor] = lambda layer, batch: run_layer(layer, batch, rotary)  # noqa: E731
    for half in _HALVES:
        if half is _HALVES[1]:
            theirs, ours = (_between(*pair, run) for pair in zip((dense, compressed), hidden, strict=True))
            hidden, run = (theirs, ours), _mlp_half
        for group in half:
            stage = [linear for linear in linears if linear.name.removeprefix(inside) in group]
            if not stage:
                continue
            anchors = _gather(dense, compressed, hidden, run, stage, inside, damping, group is half[-1])
            for linear, known in zip(stage, anchors, strict=True):
                take(linear, known)
    return torch.cat([_mlp_half(dense, batch) for batch in batches(hidden[0])])


def _gather(
    dense: nn.Module,
    compressed: nn.Module,
    hidden: tuple[Tensor, Tensor],
    run: Callable[[nn.Module, Tensor], Tensor],
    stage: list[Linear],
    inside: str,
    damping: float,
    writes: bool,
) -> list[Anchors]:
    """Return the sums for each linear of a stage: either they have one input, or one writes to the residual stream."""
    name = stage[0].name.removeprefix(inside)
    weights = [weight_of(dense, linear, inside) for linear in stage]
    sums = Anchors(stage[0].in_features, damping, stage[0].out_features if writes else None, weights[0].device)
    energy = [0.0] * len(stage)
    for theirs, ours in zip(*map(batches, hidden), strict=True):
        x = _input_of(dense, name, partial(run, dense, theirs))
        read = _input_of(compressed, name, partial(run, compressed, ours))
        wanted = [nn.functional.linear(x, weight) for weight in weights]
        if writes:
            wanted[0] += (theirs - ours).flatten(0, -2)
        sums.add(wanted[0] if writes else x, read)
        energy = [sum_ + float(y.double().square().sum()) for sum_, y in zip(energy, wanted, strict=True)]
    return [sums.of(one) for one in energy]


def _mlp_half(layer: nn.Module, between: Tensor) -> Tensor:
    """Return a layer's outputs for the residual stream between its attention and MLP, both [rows, length, hidden]."""
    return between + layer.get_submodule("mlp")(layer.get_submodule(BETWEEN)(between))


def _between(layer: nn.Module, hidden: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    """Return the residual stream between attention and MLP for a layer's inputs, both [rows, length, hidden]."""
    parts = [_input_of(layer, BETWEEN, partial(run, layer, batch)) for batch in batches(hidden)]
    return torch.cat(parts).view_as(hidden)


class _Reached(Exception):
    """Raised when the module of interest is called, to skip the rest of the layer."""


def _input_of(layer: nn.Module, name: str, run: Callable[[], object]) -> Tensor:
    """Return the input [tokens, features] of the module ``name`` when ``run`` calls the layer."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].flatten(0, -2))
        raise _Reached

    hook = layer.get_submodule(name).register_forward_pre_hook(keep)
    try:
        run()
    except _Reached:
        pass
    finally:
        hook.remove()
    return seen[0]
