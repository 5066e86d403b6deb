"""Compress one decoder layer: factors, refinement, the tensors to write, and the facts for the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from neuronmm.compression.anchored import Anchors
from neuronmm.compression.anchored_layer import anchored_factors
from neuronmm.compression.factorize import Factors, factorize
from neuronmm.compression.fisher import known_moments
from neuronmm.compression.layer_pair import LayerPair
from neuronmm.compression.moments import Moments
from neuronmm.compression.plan import Plan
from neuronmm.compression.ranks import Linear
from neuronmm.compression.refine import course_of, refine
from neuronmm.compression.report import Matrix
from neuronmm.compression.run import Run
from neuronmm.compression.streaming import StreamedModel, Streams, advance
from neuronmm.models import processes
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS

_Losses = tuple[float, list[float]]
"""The relative error and the spectrum of one linear's factors."""


def compress_layer(
    run: Run, plan: Plan, model: StreamedModel, index: int, streams: Streams, progress: Callable[[float], None]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Compress decoder layer ``index`` of ``model``, and advance ``streams`` from its inputs to its outputs.

    Args:
        run: the run.
        plan: the ranks, and which linears share an A.
        model: the dense model, float32.
        index: the number of the layer.
        streams: the inputs of the dense and of the compressed layer.
        progress: called with each further fraction of the refinement that is done; the fractions add up to 1.

    Returns:
        The tensors to write, by full name, and the layer's facts for the report.

    Raises:
        UserError: weights or activations hold NaN or infinity.
    """
    config, ranks = run.config, plan.factorised(index)
    losses, conditions, facts = dict[str, _Losses](), dict[str, float | None](), dict[str, Any]()
    with model.layer(index) as dense:
        pair = LayerPair(dense, f"{LAYERS}.{index}.")

        def dtype_of(linear: Linear) -> torch.dtype:
            return model.reader[f"{linear.name}.weight"].dtype

        def working_dtype(linear: Linear) -> torch.dtype:
            return torch.float32 if config.form == "pivoted" else dtype_of(linear)  # rounded after pivoting

        def factorise(linear: Linear, sums: Moments | Anchors | None) -> Factors:
            return factorize(pair.weight(linear), ranks[linear], sums, scaled=config.method == "asvd")

        def replace(linear: Linear, factors: Factors) -> None:
            pair.replace(linear, factors.A, factors.B, working_dtype(linear))
            losses[linear.name] = factors.relative_error, list(factors.spectrum)

        try:
            if config.method == "anchored":
                outputs = anchored_factors(
                    pair,
                    streams,
                    list(ranks),
                    config.damping,
                    lambda linear, sums: replace(linear, factorise(linear, sums)),
                )
            else:
                names = [pair.inside(part) for linear in plan.of_layer(index) for part in linear.parts]
                moments, outputs = run.store.gather(index, dense, names, streams.dense, streams.rotary, config.damping)
                known = known_moments(run, index, dense, moments)
                plain = config.method == "svd"
                found = processes.shared_out(
                    list(ranks), lambda linear: factorise(linear, None if plain else known(linear))
                )
                for linear, factors in found.items():
                    replace(linear, factors)
                del known, moments, found  # the refinement is the peak of a layer's memory
            streams.dense = outputs  # the inputs' memory is free for the refinement
            for part in (part for linear in ranks for part in linear.parts):
                model.release(dense.get_submodule(pair.inside(part)))
            if config.refine != "off" and ranks:
                course, seed = course_of(config), config.seed * len(plan.linears) + index
                dtype = working_dtype(next(iter(ranks)))
                facts["refinement"] = refine(pair.compressed, streams, outputs, course, seed, dtype, progress)
            else:
                progress(1.0)
            if config.form == "pivoted" and ranks:  # last, because training gains more with two factors
                conditions |= pair.pivot(dtype_of(next(iter(ranks))))
        except ValueError as error:
            raise UserError(
                f"{model.reader.folder}: {pair.prefix}*: {error}; the checkpoint is damaged or unstable in float32"
            ) from None
        tensors = pair.tensors(model.reader)
        if len(streams.compressed):
            pair.load(tensors)
            streams.compressed = advance(pair.compressed, streams.compressed, streams.rotary)
    facts["forms"] = pair.forms()
    facts["matrices"] = [
        _matrix(linear, ranks.get(linear), losses.get(linear.name), conditions.get(linear.name), config.ratio)
        for linear in plan.of_layer(index)
    ]
    return tensors, facts


def _matrix(
    linear: Linear, rank: int | None, losses: _Losses | None, condition: float | None, ratio: float
) -> dict[str, Any]:
    error, spectrum = losses or (0.0, None)
    matrix: Matrix = {
        "name": linear.name,
        "sharing": [part.name for part in linear.members[1:]],
        "shape": [linear.out_features, linear.in_features],
        "rank": rank,
        "dense_parameters": linear.dense,
        "kept_parameters": linear.parameters(rank),
        "asked_ratio": ratio,
        "realised_ratio": 1 - linear.parameters(rank) / linear.dense,
        "relative_error": error,
        "spectrum": spectrum,
        "pivot_condition": condition,
    }
    return dict(matrix)
