"""Descriptions of whole models in few bits, for the decode step: dense weights, factors and the embedding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from neuronmm.kernels import quantise
from neuronmm.kernels.cpu.step import LayerWeights, LinearWeights, ModelWeights
from neuronmm.kernels.low_bits import LowBits, Weight


def quantise_model(weights: ModelWeights, of_linears: Callable[[Tensor], LowBits] = quantise) -> ModelWeights:
    """Return the model with embedding and head in int8 and every other matrix rounded by ``of_linears``.

    Norms, biases and matrices of few bits stay as they are. A matrix with two uses (a tied embedding, a shared A) is
    quantised once and keeps both uses.
    """
    quantised: dict[int, Weight] = {}

    def matrix(weight: Weight, rounded: Callable[[Tensor], LowBits]) -> Weight:
        if not isinstance(weight, Tensor):
            return weight
        if id(weight) not in quantised:
            quantised[id(weight)] = rounded(weight)
        return quantised[id(weight)]

    def linear(part: LinearWeights, rounded: Callable[[Tensor], LowBits]) -> LinearWeights:
        return replace(part, A=matrix(part.A, rounded), B=None if part.B is None else matrix(part.B, rounded))

    def layer(part: LayerWeights) -> LayerWeights:
        parts = {field.name: getattr(part, field.name) for field in fields(part)}
        changed: dict[str, Any] = {k: linear(v, of_linears) for k, v in parts.items() if isinstance(v, LinearWeights)}
        return replace(part, **changed)

    return replace(
        weights,
        embedding=matrix(weights.embedding, quantise),
        layers=[layer(part) for part in weights.layers],
        head=linear(weights.head, quantise),
    )
