"""Anchored factors of one decoder layer, linear by linear in execution order, so that each gets compressed inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from neuronmm.compression.anchored import Anchors
from neuronmm.compression.layer_pair import LayerPair
from neuronmm.compression.moments import BETWEEN
from neuronmm.compression.ranks import Linear
from neuronmm.compression.streaming import Streams, batches, of_batches, run_layer
from neuronmm.models import processes
from neuronmm.models.families import STAGES

_HALVES = (STAGES[:2], STAGES[2:])

Forward = Callable[[nn.Module, Tensor], Tensor]
"""A function that runs a layer, or its MLP half, on hidden states [rows, length, hidden]."""


def anchored_factors(
    pair: LayerPair,
    streams: Streams,
    linears: list[Linear],
    damping: float,
    compress_linear: Callable[[Linear, Anchors], None],
) -> Tensor:
    """Visit the layer's linears in execution order; ``compress_linear`` replaces each in the compressed layer.

    Linears that write to the residual stream fit the dense model's stream, not only their own dense output, and so
    correct earlier errors.

    Args:
        pair: the dense and the compressed layer; in the latter, linears that are not factorised yet are dense.
        streams: the inputs of both.
        linears: the linears to compress_linear; those with a shared A count as one.
        damping: relative to the mean diagonal entry of the Gram matrix.
        compress_linear: called with each linear and the sums that determine its factors.

    Returns:
        The dense layer's outputs [rows, length, hidden].
    """
    hidden = (streams.dense, streams.compressed)
    forward: Forward = lambda layer, batch: run_layer(layer, batch, streams.rotary)  # noqa: E731
    for half in _HALVES:
        if half is _HALVES[1]:
            hidden = (_between(pair.dense, hidden[0], forward), _between(pair.compressed, hidden[1], forward))
            forward = _mlp_half
        for group in half:
            stage = [linear for linear in linears if pair.inside(linear) in group]
            if not stage:
                continue
            anchors = _gather(pair, hidden, forward, stage, damping, writes=group is half[-1])
            for linear, sums in zip(stage, anchors, strict=True):
                compress_linear(linear, sums)
    return of_batches(partial(_mlp_half, pair.dense), hidden[0])


def _gather(
    pair: LayerPair,
    hidden: tuple[Tensor, Tensor],
    forward: Forward,
    stage: list[Linear],
    damping: float,
    *,
    writes: bool,
) -> list[Anchors]:
    """Return the sums for each linear of a stage: either they have one input, or one writes to the residual stream."""
    name = pair.inside(stage[0])
    weights = [pair.weight(linear) for linear in stage]
    sums = Anchors(stage[0].in_features, damping, stage[0].out_features if writes else None, weights[0].device)
    powers = [0.0] * len(stage)
    for dense_batch, compressed_batch in zip(*map(batches, hidden), strict=True):
        dense_inputs = _input_of(pair.dense, name, partial(forward, pair.dense, dense_batch))
        compressed_inputs = _input_of(pair.compressed, name, partial(forward, pair.compressed, compressed_batch))
        targets = [nn.functional.linear(dense_inputs, weight) for weight in weights]
        if writes:
            targets[0] += (dense_batch - compressed_batch).flatten(0, -2)
        sums.add(targets[0] if writes else dense_inputs, compressed_inputs)
        powers = [power + float(y.double().square().sum()) for power, y in zip(powers, targets, strict=True)]
    processes.add_up(sums.gram, sums.cross)
    powers = [processes.total(power) for power in powers]
    return [sums.of(power) for power in powers]


def _mlp_half(layer: nn.Module, between: Tensor) -> Tensor:
    """Return a layer's outputs for the residual stream between its attention and MLP, both [rows, length, hidden]."""
    return between + layer.get_submodule("mlp")(layer.get_submodule(BETWEEN)(between))


def _between(layer: nn.Module, hidden: Tensor, forward: Forward) -> Tensor:
    """Return the residual stream between attention and MLP for a layer's inputs, both [rows, length, hidden]."""
    return of_batches(lambda batch: _input_of(layer, BETWEEN, partial(forward, layer, batch)), hidden)


class _Reached(Exception):
    """Raised when the module of interest is called, to skip the rest of the layer."""


def _input_of(layer: nn.Module, name: str, forward: Callable[[], object]) -> Tensor:
    """Return the input [tokens, features] of the module ``name`` when ``forward`` calls the layer."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].flatten(0, -2))
        raise _Reached

    hook = layer.get_submodule(name).register_forward_pre_hook(keep)
    try:
        forward()
    except _Reached:
        pass
    finally:
        hook.remove()
    return seen[0]
