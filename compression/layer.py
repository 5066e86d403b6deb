"""Everything a run does to one decoder layer: factors, refinement, the tensors to write and what to say of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm.compression.anchored import Anchors
from neuronmm.compression.block import Rotary, advance, swap, unshared, weight_of
from neuronmm.compression.calibration_store import CalibrationStore, stored_moments
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.factorize import factorize
from neuronmm.compression.moments import Moments
from neuronmm.compression.plan import Plan
from neuronmm.compression.ranks import Linear
from neuronmm.compression.reader import Reader
from neuronmm.compression.refine import COURSES, refine
from neuronmm.compression.report import Matrix
from neuronmm.compression.sequential import anchored_factors
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS

Streams = dict[str, Tensor]
"""Hidden states [rows, length, hidden] of the calibration rows: ``dense``, the dense model's; and where they are wanted
``compressed``, those of the model compressed so far."""


def compress_layer(
    layer: nn.Module,
    index: int,
    reader: Reader,
    plan: Plan,
    streams: Streams,
    rotary: Rotary | None,
    config: CompressionConfig,
    store: CalibrationStore | None,
    release: Callable[[nn.Module], None],
    advanced: Callable[[float], None],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Compress decoder layer ``index`` and take ``streams`` through it.

    Args:
        layer: the dense layer, float32; it stays as it is, but for what is released.
        index: its number.
        reader: the checkpoint it comes from.
        plan: ranks and sharing.
        streams: the layer's inputs, replaced by its outputs; empty where no text has to pass the layer.
        rotary: RoPE's cos and sin, where there are streams.
        config: the run's settings.
        store: where the layer's moments are found, or kept for other runs.
        release: called with the dense linears that have been factorised.
        advanced: called with the further share of the refinement that is done; the shares add up to 1.

    Returns:
        The tensors to write, by full name, and the layer's facts for the report.

    Raises:
        UserError: weights or activations hold NaN or infinity.
    """
    inside = f"{LAYERS}.{index}."
    chosen = [linear for linear in plan.of_layer(index) if plan.ranks[linear.name] is not None]
    compressed = unshared(layer)
    errors: dict[str, float] = {}

    def take(linear: Linear, known: Moments | Anchors | None) -> None:
        rank = plan.ranks[linear.name]
        assert rank is not None
        factors = factorize(weight_of(layer, linear, inside), rank, known, scaled=config.method == "asvd")
        swap(compressed, linear, factors, inside, reader[f"{linear.name}.weight"].dtype)
        errors[linear.name] = factors.relative_error

    facts: dict[str, Any] = {}
    outputs: Tensor | None
    try:
        if config.method == "anchored":
            assert rotary is not None
            hidden = (streams["dense"], streams["compressed"])
            outputs = anchored_factors(layer, compressed, hidden, rotary, chosen, inside, config.damping, take)
        else:
            names = [part.name.removeprefix(inside) for linear in plan.of_layer(index) for part in linear.parts]
            moments, outputs = stored_moments(layer, index, streams.get("dense"), rotary, names, config.damping, store)
            for linear in chosen:
                take(linear, None if config.method == "svd" else moments[linear.name.removeprefix(inside)])
        for part in (part for linear in chosen for part in linear.parts):
            release(layer.get_submodule(part.name.removeprefix(inside)))
        if config.refine != "off" and chosen:
            assert rotary is not None and outputs is not None
            course, seed = COURSES[config.refine], config.seed * len(plan.linears) + index
            dtype = reader[f"{chosen[0].name}.weight"].dtype
            facts["refinement"] = refine(
                compressed, streams["compressed"], outputs, rotary, course, seed, dtype, advanced
            )
        else:
            advanced(1.0)  # nothing to refine
    except ValueError as error:
        raise UserError(
            f"{reader.folder}: {inside}*: {error}; the checkpoint is damaged or unstable in float32"
        ) from None
    tensors = _tensors(compressed, reader, inside)
    if "compressed" in streams:
        assert rotary is not None
        _read_back(compressed, tensors, inside)
        streams["compressed"] = advance(compressed, streams["compressed"], rotary)
    if outputs is not None:
        streams["dense"] = outputs
    facts["matrices"] = [
        _line(linear, plan.ranks[linear.name], errors.get(linear.name, 0.0), config.ratio)
        for linear in plan.of_layer(index)
    ]
    return tensors, facts


def _tensors(compressed: nn.Module, reader: Reader, inside: str) -> dict[str, Tensor]:
    """The layer as it is written: new values in the dtype of what they replace, everything else untouched."""
    dense = {name: reader[name] for name in reader.under(inside) if not name.endswith("rotary_emb.inv_freq")}
    tensors: dict[str, Tensor] = {}
    for name, value in compressed.state_dict(prefix=inside).items():
        linear, _, factor = name.rpartition(".")[0].rpartition(".")
        if name in dense:
            tensors[name] = value.to(dense[name].dtype) if "norm" in name else dense[name]
        else:
            assert factor in ("A", "B")
            tensors[name] = value.to(dense[f"{linear}.{name.rpartition('.')[2]}"].dtype)
    return tensors


@torch.no_grad()
def _read_back(compressed: nn.Module, tensors: dict[str, Tensor], inside: str) -> None:
    """Give the layer the values as they are written, so that the layers after it see their rounding."""
    for name, parameter in compressed.named_parameters():
        parameter.copy_(tensors[inside + name])


def _line(linear: Linear, rank: int | None, error: float, ratio: float) -> dict[str, Any]:
    matrix: Matrix = {
        "name": linear.name,
        "sharing": [part.name for part in linear.members[1:]],
        "shape": [linear.out_features, linear.in_features],
        "rank": rank,
        "dense_parameters": linear.dense,
        "kept_parameters": linear.kept(rank),
        "asked_ratio": ratio,
        "realised_ratio": 1 - linear.kept(rank) / linear.dense,
        "relative_error": error,
    }
    return dict(matrix)
