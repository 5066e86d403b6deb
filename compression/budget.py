"""Find the ratio that keeps the compressed model within a distance of the dense one, by measurement.

The closed forms are nested: the factors of a lower rank are the first rows and columns of those of a higher one. One
eigendecomposition of a linear therefore serves every ratio, and one pass over the layers measures several candidates,
each with its own stream of hidden states. The first pass measures ratios over the whole range, the second one some
around the place where the divergence crosses the budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm.compression.factorize import factorize
from neuronmm.compression.fidelity import divergence
from neuronmm.compression.layer_pair import LayerPair, weight_of
from neuronmm.compression.plan import Plan, make_plan
from neuronmm.compression.ranks import MAX_RATIO, MIN_RATIO, Linear
from neuronmm.compression.run import Run
from neuronmm.compression.streaming import StreamedModel, advance
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS

_COARSE = (MIN_RATIO, 0.1, 0.2, 0.4)
_NEAR = (0.93, 0.98, 1.03, 1.08)  # of the ratio at which the line between two measured ones meets the budget
_ROUNDING = 0.95
"""A trial may use this fraction of the budget, because the finished factors, in their final form, are rounded again.

Measured on SmolLM2-135M: rounding the pivoted form took the divergence from 0.099 to 0.101 nats per token.
"""

_STAGE = "searching the ratio"


def find_ratio(
    run: Run, model: StreamedModel, linears: list[Linear], spectra: dict[str, Tensor], rows: Tensor
) -> tuple[float, list[dict[str, Any]]]:
    """Return the largest measured ratio that keeps ``run.config.budget``, and all measurements by increasing ratio.

    A measurement has the ratio and the :func:`~neuronmm.compression.fidelity.divergence` over ``rows`` of the closed
    form, with two factors in the dtype of the checkpoint. The workspace keeps the measurements for a resumed run.

    Args:
        run: the run; its store has the moments of every layer.
        model: the dense model, float32.
        linears: the targeted linears, each with its own A.
        spectra: the result of :func:`~neuronmm.compression.plan.measure_spectra`.
        rows: held-out token ids [rows, length].

    Raises:
        UserError: the smallest ratio exceeds the budget.
    """
    saved = run.workspace.search()
    if saved is not None:
        return _largest_within(saved, run.config.budget), saved
    limit = run.config.budget
    assert limit is not None
    trials = _measured(run, model, linears, spectra, rows, _COARSE)
    if not trials[MIN_RATIO]["kl"] <= limit:
        raise UserError(
            f"--budget {limit:g}: removing {MIN_RATIO:.0%} of the targeted weights already costs "
            f"{trials[MIN_RATIO]['kl']:.3g} nats per token on held-out text; give a larger budget"
        )
    trials |= _measured(run, model, linears, spectra, rows, _near(trials, _ROUNDING * limit))
    search = [trials[ratio] for ratio in sorted(trials)]
    run.workspace.save_search(search)
    return _largest_within(search, limit), search


def _largest_within(search: list[dict[str, Any]], limit: float | None) -> float:
    """Return the largest ratio of ``search`` that leaves room for the last rounding, at least the smallest one."""
    kept = (trial["ratio"] for trial in search if limit is not None and trial["kl"] <= _ROUNDING * limit)
    return float(max(kept, default=MIN_RATIO))


def _near(trials: dict[float, dict[str, Any]], limit: float) -> list[float]:
    """Return the ratios to measure after ``trials``: around the place where the divergence meets ``limit``.

    Between two ratios its logarithm is taken to be linear in that of the ratio.
    """
    low = max((ratio for ratio, trial in trials.items() if trial["kl"] <= limit), default=MIN_RATIO)
    above = [ratio for ratio in trials if ratio > low]
    if not above:
        return [round(low + (MAX_RATIO - low) * step / 4, 4) for step in range(1, 5)]
    high = min(above)
    logs = [math.log(max(trials[ratio]["kl"], 1e-12)) for ratio in (low, high)]
    place = (math.log(limit) - logs[0]) / max(logs[1] - logs[0], 1e-12)
    crossing = low * (high / low) ** min(max(place, 0.0), 1.0)
    return [ratio for ratio in (round(crossing * factor, 4) for factor in _NEAR) if low < ratio < high]


@torch.no_grad()
def _measured(
    run: Run,
    model: StreamedModel,
    linears: list[Linear],
    spectra: dict[str, Tensor],
    rows: Tensor,
    ratios: Sequence[float],
) -> dict[float, dict[str, Any]]:
    """Return the measurement at each of ``ratios``, from one pass over the layers."""
    if not ratios:
        run.progress(_STAGE, 0.5)
        return {}
    plans = [make_plan(linears, run.config.model_copy(update={"ratio": ratio}), spectra) for ratio in ratios]
    streams = model.streams(rows, ("dense",))
    hidden = [streams.dense for _ in plans]
    for index in range(len(model)):
        with model.layer(index) as layer:
            factors = _factors(run, layer, index, plans, linears)
            for number, plan in enumerate(plans):
                pair = LayerPair(layer, f"{LAYERS}.{index}.")
                for linear, rank in plan.factorised(index).items():
                    A, B = factors[linear]
                    pair.replace(linear, A[:rank], B[:, :rank], model.reader[f"{linear.name}.weight"].dtype)
                hidden[number] = advance(pair.compressed, hidden[number], streams.rotary)
            streams.dense = advance(layer, streams.dense, streams.rotary)
        model.reader.close()  # pages of a mapped shard count as resident
        run.progress(_STAGE, 0.5 / len(model))
    return {
        ratio: {"ratio": ratio, **divergence(model, streams.dense, states)}
        for ratio, states in zip(ratios, hidden, strict=True)
    }


def _factors(
    run: Run, layer: nn.Module, index: int, plans: list[Plan], linears: list[Linear]
) -> dict[Linear, tuple[Tensor, Tensor]]:
    """Return A and B of the linears of one layer at the highest rank that any of ``plans`` gives them."""
    prefix = f"{LAYERS}.{index}."
    highest: dict[Linear, int] = {}
    for plan in plans:
        for linear, rank in plan.factorised(index).items():
            highest[linear] = max(rank, highest.get(linear, 0))
    names = [linear.name.removeprefix(prefix) for linear in linears if linear.name.startswith(prefix)]
    device = next(layer.parameters()).device
    moments = run.store.moments(index, names, run.config.damping, device)
    factors: dict[Linear, tuple[Tensor, Tensor]] = {}
    for linear, rank in highest.items():
        known = None if run.config.method == "svd" else moments[linear.name.removeprefix(prefix)]
        best = factorize(weight_of(layer, linear, prefix), rank, known, scaled=run.config.method == "asvd")
        factors[linear] = best.A, best.B
    return factors
