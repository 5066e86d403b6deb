"""Find the ratio that keeps the compressed model within a distance of the dense one, by measurement.

The closed forms are nested: the factors of a lower rank are the first rows and columns of those of a higher one. One
eigendecomposition of a linear therefore serves every ratio, and one pass over the layers measures several candidates,
each with its own stream of hidden states. The dense model runs once, before. The first pass measures ratios over the
whole range, the second one some around the place where the divergence crosses the budget. bf16 rounds pivoted factors
to less precision than two factors, and pivoting takes long, so a third pass measures what it adds at one ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm.compression.factorize import factorize
from neuronmm.compression.fidelity import divergences, final_states
from neuronmm.compression.fisher import known_moments
from neuronmm.compression.layer_pair import LayerPair, weight_of
from neuronmm.compression.plan import Plan, make_plan
from neuronmm.compression.ranks import MAX_RATIO, MIN_RATIO, Linear
from neuronmm.compression.run import Run
from neuronmm.compression.streaming import StreamedModel, advance
from neuronmm.models import processes
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS

_COARSE = (MIN_RATIO, 0.1, 0.2, 0.4)
_NEAR = (0.93, 0.98, 1.03, 1.08)  # of the ratio at which the line between two measured ones meets the budget
_STAGE, _PASSES = "searching the ratio", 4  # the dense model's, and three of compressed ones


@torch.no_grad()
def find_ratio(
    run: Run, model: StreamedModel, linears: list[Linear], spectra: dict[str, Tensor], rows: Tensor
) -> tuple[float, dict[str, Any]]:
    """Return the largest measured ratio that keeps ``run.config.budget``, and what was measured.

    The workspace keeps the measurements for a resumed run.

    Args:
        run: the run; its store has the moments of every layer.
        model: the dense model, float32.
        linears: the targeted linears, each with its own A.
        spectra: the result of :func:`~neuronmm.compression.plan.measure_spectra`.
        rows: held-out token ids [rows, length].

    Returns:
        The ratio, and plain values for the report: ``trials`` has, by increasing ratio, the ratio and the
        :func:`~neuronmm.compression.fidelity.divergences` over ``rows`` of the closed form, with two factors in the
        dtype of the checkpoint; ``rounding`` is the divergence that the pivoted form adds.

    Raises:
        UserError: the smallest ratio exceeds the budget.
    """
    limit = run.config.budget
    assert limit is not None
    search = run.workspace.search()
    if search is None:
        expected = final_states(model, rows, partial(run.progress, _STAGE, 1 / _PASSES / len(model)))
        measure = partial(_measured, run, model, linears, spectra, rows, expected)
        trials = measure(_COARSE)
        if not trials[MIN_RATIO]["kl"] <= limit:
            raise UserError(
                f"--budget {limit:g}: removing {MIN_RATIO:.0%} of the targeted weights already costs "
                f"{trials[MIN_RATIO]['kl']:.3g} nats per token on held-out text; give a larger budget with --resume"
            )
        trials |= measure(_near(trials, limit))
        finite = [trials[ratio] for ratio in sorted(trials) if math.isfinite(trials[ratio]["kl"])]  # as JSON's numbers
        search = {"trials": finite, "rounding": 0.0}
        found = _largest(search, limit)
        rounded = measure([found] if run.config.form == "pivoted" else [], pivot=True)
        for ratio, trial in rounded.items():
            added = trial["kl"] - trials[ratio]["kl"]
            search["rounding"] = max(added, 0.0) if math.isfinite(added) else limit  # which leaves the smallest ratio
        run.workspace.save_search(search)
    return _largest(search, limit), search


def _largest(search: dict[str, Any], limit: float) -> float:
    """Return the largest ratio within ``limit`` after rounding; the smallest one is measured to be within it before."""
    kept = (trial["ratio"] for trial in search["trials"] if trial["kl"] + search["rounding"] <= limit)
    return float(max(kept, default=MIN_RATIO))


def _near(trials: dict[float, dict[str, Any]], limit: float) -> list[float]:
    """Return the ratios to measure after ``trials``: around the place where the divergence meets ``limit``.

    Between two ratios its logarithm is taken to be linear in that of the ratio.
    """
    low = max(ratio for ratio, trial in trials.items() if trial["kl"] <= limit)
    above = [ratio for ratio in trials if ratio > low]
    if not above:
        return [round(low + (MAX_RATIO - low) * step / 4, 4) for step in range(1, 5)]
    high = min(above)
    logs = [math.log(max(trials[ratio]["kl"], 1e-12)) for ratio in (low, high)]
    place = (math.log(limit) - logs[0]) / max(logs[1] - logs[0], 1e-12)
    crossing = low * (high / low) ** min(max(place, 0.0), 1.0)
    return [ratio for ratio in (round(crossing * factor, 4) for factor in _NEAR) if low < ratio < high]


def _measured(
    run: Run,
    model: StreamedModel,
    linears: list[Linear],
    spectra: dict[str, Tensor],
    rows: Tensor,
    expected: Tensor,
    ratios: Sequence[float],
    *,
    pivot: bool = False,
) -> dict[float, dict[str, Any]]:
    """Return the trial at each of ``ratios``, from one pass over the layers; with ``pivot`` in the pivoted form.

    ``expected`` are the dense model's final states for the ``rows`` of this process.
    """
    if not ratios:
        run.progress(_STAGE, 1 / _PASSES)
        return {}
    plans = [make_plan(linears, run.config.model_copy(update={"ratio": ratio}), spectra) for ratio in ratios]
    streams = model.streams(processes.part(rows), ("dense",))
    hidden = [streams.dense for _ in plans]
    dtype = model.reader[f"{linears[0].name}.weight"].dtype
    for index in range(len(model)):
        with model.layer(index) as layer:
            factors = _factors(run, layer, index, plans, linears)
            for number, plan in enumerate(plans):
                pair = LayerPair(layer, f"{LAYERS}.{index}.")
                for linear, rank in plan.factorised(index).items():
                    A, B = factors[linear]
                    pair.replace(linear, A[:rank], B[:, :rank], torch.float32 if pivot else dtype)
                if pivot:
                    pair.pivot(dtype)
                hidden[number] = advance(pair.compressed, hidden[number], streams.rotary)
        model.reader.close()  # pages of a mapped shard count as resident
        run.progress(_STAGE, 1 / _PASSES / len(model))
    measured = divergences(model, expected, hidden)
    return {ratio: {"ratio": ratio, **trial} for ratio, trial in zip(ratios, measured, strict=True)}


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
    known = known_moments(run, index, layer, run.store.moments(index, names, run.config.damping, device))

    def factors(linear: Linear) -> tuple[Tensor, Tensor]:
        sums = None if run.config.method == "svd" else known(linear)
        best = factorize(weight_of(layer, linear, prefix), highest[linear], sums, scaled=run.config.method == "asvd")
        return best.A, best.B

    return processes.shared_out(list(highest), factors)
