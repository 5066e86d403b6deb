"""Int8 weights: one scale a row, symmetric, rounded to nearest. Half the bytes of bf16, and decoding is bound by bytes.

The activations stay in fp32, so the rounding of the weights is the only error: at most half a step an element, where a
row's step is its largest absolute value / 127.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from neuronmm.kernels.cpu import arena
from neuronmm.kernels.cpu.step import Int8, LayerWeights, LinearWeights, ModelWeights


def quantize(weight: Tensor) -> Int8:
    """Round a matrix [out, in] of any float dtype to int8 by row."""
    wide = weight.detach().float()
    steps = wide.abs().amax(dim=1) / 127
    inverse = torch.where(steps > 0, 1 / steps, 0)
    return Int8((wide * inverse[:, None]).round_().to(torch.int8), steps)


def quantize_model(weights: ModelWeights) -> ModelWeights:
    """Every matrix of the model in int8, dense weights and factors alike, in an arena of their own.

    Norms and biases stay as they are. A tied embedding stays tied.
    """
    tied = weights.head.B is None and weights.head.A is weights.embedding
    embedding = _quantize(weights.embedding)
    layers = [_layer(layer) for layer in weights.layers]
    head = replace(weights.head, A=embedding) if tied else _linear(weights.head)
    found = [embedding, *(m for part in layers for m in _matrices(part)), *(() if tied else (head.A, head.B))]
    arena.gather(matrix.values for matrix in found if isinstance(matrix, Int8))
    return replace(weights, embedding=embedding, layers=layers, head=head)


def _quantize(matrix: Tensor | Int8) -> Int8:
    return matrix if isinstance(matrix, Int8) else quantize(matrix)


def _linear(linear: LinearWeights) -> LinearWeights:
    return replace(linear, A=_quantize(linear.A), B=None if linear.B is None else _quantize(linear.B))


def _linears(layer: LayerWeights) -> dict[str, LinearWeights]:
    parts = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return {name: part for name, part in parts.items() if isinstance(part, LinearWeights)}


def _layer(layer: LayerWeights) -> LayerWeights:
    changed: dict[str, Any] = {name: _linear(part) for name, part in _linears(layer).items()}
    return replace(layer, **changed)


def _matrices(layer: LayerWeights) -> list[Tensor | Int8 | None]:
    return [matrix for part in _linears(layer).values() for matrix in (part.A, part.B)]
