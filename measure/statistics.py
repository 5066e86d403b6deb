"""Summarise raw measured times into the figures of the benchmark report."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuronmm.measure.benchmark import Run

STALL_PROBE = 0.7
"""A round is flagged if a bandwidth probe beside it is below this fraction of the point's median probe."""
STALL_TIME = 1.5
"""A round is also flagged if a run of a variant takes longer than this multiple of the variant's median run."""


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def summarise_point(
    batch: int,
    length: int,
    rounds: list[dict[str, Any]],
    measured: dict[str, list[Run]],
    warm_ups: dict[str, float],
    memory: dict[str, int | None],
    step_bytes: dict[str, int],
) -> dict[str, Any]:
    """Return the report's entry for one batch size and prompt length.

    TTFT and TPOT are in seconds. The TPOT of a run is the mean over its later tokens. Median, min and max are over
    runs; p90 is over all single tokens. ``bandwidth_share`` is weight bytes per step over TPOT, as a fraction of the
    median probe; it does not count the KV cache.
    """
    _flag(rounds, measured)
    bandwidth = median(r[when] for r in rounds for when in ("probe_before", "probe_after"))
    variants = {}
    for name, runs in measured.items():
        ttft = summarise([run.ttft for run in runs])
        tpot = summarise([sum(run.steps) / len(run.steps) for run in runs])
        steps = [step for run in runs for step in run.steps]
        tpot["p90"] = quantiles(steps, n=10)[-1] if len(steps) > 1 else steps[0]
        variants[name] = {
            "ttft": ttft,
            "tpot": tpot,
            "decode_tokens_per_second": batch / tpot["median"],
            "prefill_tokens_per_second": batch * length / ttft["median"],
            "bandwidth_share": step_bytes[name] / tpot["median"] / bandwidth,
            "limit_tokens_per_second": batch * bandwidth / step_bytes[name],
            "peak_memory_bytes": memory[name],
            "warm_up_seconds": warm_ups[name],
            "runs": [{"ttft": run.ttft, "tpot": sum(run.steps) / len(run.steps)} for run in runs],
        }
    return {"batch": batch, "prompt_length": length, "rounds": rounds, "variants": variants}


def _flag(rounds: list[dict[str, Any]], measured: dict[str, list[Run]]) -> None:
    """Mark each round that other work on the machine seems to have disturbed; its figures are kept."""
    usual_probe = median(min(r["probe_before"], r["probe_after"]) for r in rounds)
    totals = {name: [run.ttft + sum(run.steps) for run in runs] for name, runs in measured.items()}
    for index, entry in enumerate(rounds):
        slow_probe = min(entry["probe_before"], entry["probe_after"]) < STALL_PROBE * usual_probe
        slow_run = any(times[index] > STALL_TIME * median(times) for times in totals.values())
        entry["stalled"] = slow_probe or slow_run
