"""Anchored factors of one decoder layer: its linears in the order they run, each reading what those before it wrote."""

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
    """Go through the layer's linears; ``take`` puts the factors of each into ``compressed``.

    Those that write to the residual stream aim at the dense model's stream, not at their own dense output alone, and so
    make good what was lost before them.

    Args:
        dense: the layer.
        compressed: the same, with dense linears still where factors are to come.
        hidden: what enters the one and the other [rows, length, hidden].
        rotary: RoPE's cos and sin.
        linears: those to factorise; several that share an A as one.
        inside: the layer's name, which the linears' names start with.
        damping: relative to the Gram matrix's mean diagonal entry.
        take: called with a linear and what its factors are to be made of.

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
    """The sums for each linear of a stage: they read one input, or one of them writes to the residual stream."""
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
    """A layer's outputs from the residual stream between its attention and its MLP, both [rows, length, hidden]."""
    return between + layer.get_submodule("mlp")(layer.get_submodule(BETWEEN)(between))


def _between(layer: nn.Module, hidden: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    """The residual stream between attention and MLP for a layer's inputs, both [rows, length, hidden]."""
    parts = [_input_of(layer, BETWEEN, partial(run, layer, batch)) for batch in batches(hidden)]
    return torch.cat(parts).view_as(hidden)


class _Reached(Exception):
    """The module that was waited for is called: the rest of the layer is of no interest."""


def _input_of(layer: nn.Module, name: str, run: Callable[[], object]) -> Tensor:
    """What the module ``name`` of a layer reads [tokens, features] when ``run`` calls the layer."""
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
