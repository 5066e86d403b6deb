"""Quantise a whole model to int8 for the decode step: dense weights, factors and the embedding."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from neuronmm.kernels.cpu import arena
from neuronmm.kernels.cpu.step import LayerWeights, LinearWeights, ModelWeights
from neuronmm.kernels.int8 import Int8, Weight, quantise


def quantise_model(weights: ModelWeights) -> ModelWeights:
    """Return the model with every matrix in int8, in a new arena.

    Norms, biases and matrices that are int8 already stay as they are. A matrix with two uses (a tied embedding, a
    shared A) is quantised once and keeps both uses.
    """
    quantised: dict[int, Int8] = {}

    def matrix(weight: Weight) -> Weight:
        if isinstance(weight, Int8):
            return weight
        if id(weight) not in quantised:
            quantised[id(weight)] = quantise(weight)
        return quantised[id(weight)]

    def linear(part: LinearWeights) -> LinearWeights:
        return replace(part, A=matrix(part.A), B=None if part.B is None else matrix(part.B))

    def layer(part: LayerWeights) -> LayerWeights:
        parts = {field.name: getattr(part, field.name) for field in fields(part)}
        changed: dict[str, Any] = {k: linear(v) for k, v in parts.items() if isinstance(v, LinearWeights)}
        return replace(part, **changed)

    result = replace(
        weights,
        embedding=matrix(weights.embedding),
        layers=[layer(part) for part in weights.layers],
        head=linear(weights.head),
    )
    arena.gather(matrix.values for matrix in quantised.values())
    return result
