"""The result of a benchmark: raw runs, the figures of each point, and the JSON document.

Times are in seconds, bandwidths in bytes per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from neuronmm.measure.machine import Machine
from neuronmm.measure.statistics import Spread, summarise
from neuronmm.models.spec import CompressionSpec

_COMPRESSION_FIELDS = {"method", "targets", "asked_ratio", "realised_ratio", "model_ratio", "align", "factors"}

STALL_PROBE = 0.7
"""A round is flagged if the lower of its two bandwidth probes is below this fraction of the median of such probes."""
STALL_TIME = 1.5
"""A round is also flagged if a run of a variant takes longer than this multiple of the variant's median run."""


@dataclass
class Run:
    """One generation of one variant: the time to the first token, and the time of each later one."""

    ttft: float
    steps: list[float]

    @property
    def tpot(self) -> float:
        """The mean time of the later tokens."""
        return sum(self.steps) / len(self.steps)

    @property
    def seconds(self) -> float:
        """The time of all tokens."""
        return self.ttft + sum(self.steps)


@dataclass
class Round:
    """The read bandwidth before and after one run of every variant. ``stalled``: seemingly disturbed by other work."""

    probe_before: float
    probe_after: float
    stalled: bool = False


@dataclass
class VariantRuns:
    """The measurements of one variant at one point. ``step_bytes``: weight bytes that a decode step reads."""

    runs: list[Run]
    warm_up_seconds: float
    peak_memory_bytes: int | None
    step_bytes: int


@dataclass
class TokenTimes(Spread):
    """The spread of the runs' TPOT, and the ninth decile of the times of all single tokens."""

    p90: float


@dataclass
class RunTimes:
    """TTFT and TPOT of one run."""

    ttft: float
    tpot: float


@dataclass
class Figures:
    """One variant at one point.

    Medians, minima and maxima are over runs. ``bandwidth_share`` is weight bytes per step over TPOT, as a fraction of
    the median probe; it does not count the KV cache.
    """

    ttft: Spread
    tpot: TokenTimes
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    bandwidth_share: float
    limit_tokens_per_second: float
    peak_memory_bytes: int | None
    warm_up_seconds: float
    runs: list[RunTimes]


@dataclass
class Point:
    """One batch size and prompt length."""

    batch: int
    prompt_length: int
    rounds: list[Round]
    variants: dict[str, Figures]


@dataclass
class Variant:
    """A variant's kernels, loading time, and bytes of weights."""

    kernels: str
    load_seconds: float
    weight_bytes: int
    weight_bytes_per_token: int
    factor_bytes: dict[str, int]


@dataclass
class BenchmarkResult:
    """All that ``neuronmm benchmark`` measures on a CPU or a GPU. A dense model has no ``compression``."""

    model: str
    baseline: str | None
    backend: str
    compression: CompressionSpec | None
    machine: Machine
    dtype: str
    threads: int
    runs: int
    new_tokens: int
    probe_bytes: int
    read_bandwidth: Spread
    variants: dict[str, Variant]
    points: list[Point]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document."""
        values = asdict(self)
        values["compression"] = self.compression and self.compression.model_dump(include=_COMPRESSION_FIELDS)
        probe_bytes = values.pop("probe_bytes")
        values["read_bandwidth"] = {"unit": "bytes/s", "buffer_bytes": probe_bytes, **values["read_bandwidth"]}
        return {"kind": "measured", "what": "benchmark", **values}


def summarise_point(batch: int, prompt_length: int, rounds: list[Round], measured: dict[str, VariantRuns]) -> Point:
    """Flag the disturbed ``rounds`` and return the figures of every variant."""
    _flag(rounds, measured)
    bandwidth = median(probes(rounds))
    variants = {}
    for name, variant in measured.items():
        ttft = summarise([run.ttft for run in variant.runs])
        tpot = summarise([run.tpot for run in variant.runs])
        steps = [step for run in variant.runs for step in run.steps]
        p90 = quantiles(steps, n=10, method="inclusive")[-1] if len(steps) > 1 else steps[0]
        variants[name] = Figures(
            ttft=ttft,
            tpot=TokenTimes(tpot.median, tpot.min, tpot.max, p90),
            decode_tokens_per_second=batch / tpot.median,
            prefill_tokens_per_second=batch * prompt_length / ttft.median,
            bandwidth_share=variant.step_bytes / tpot.median / bandwidth,
            limit_tokens_per_second=batch * bandwidth / variant.step_bytes,
            peak_memory_bytes=variant.peak_memory_bytes,
            warm_up_seconds=variant.warm_up_seconds,
            runs=[RunTimes(run.ttft, run.tpot) for run in variant.runs],
        )
    return Point(batch, prompt_length, rounds, variants)


def probes(rounds: Sequence[Round]) -> list[float]:
    """Return the bandwidths measured before and after every round."""
    return [bandwidth for entry in rounds for bandwidth in (entry.probe_before, entry.probe_after)]


def _flag(rounds: list[Round], measured: dict[str, VariantRuns]) -> None:
    """Mark each round that other work on the machine seems to have disturbed; its figures stay in the result."""
    usual_probe = median(min(entry.probe_before, entry.probe_after) for entry in rounds)
    times = [[run.seconds for run in variant.runs] for variant in measured.values()]
    for index, entry in enumerate(rounds):
        slow_probe = min(entry.probe_before, entry.probe_after) < STALL_PROBE * usual_probe
        slow_run = any(seconds[index] > STALL_TIME * median(seconds) for seconds in times)
        entry.stalled = slow_probe or slow_run
