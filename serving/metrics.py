"""What /metrics shows to Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from neuronmm.engine.loop import Generation
from neuronmm.engine.scheduler import Scheduler

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TPOT = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)


class Metrics:
    """Counts and times since the start of the server; times in seconds, one observation per row."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._registry = registry = CollectorRegistry()
        self._ttft = Histogram(
            "neuronmm_time_to_first_token_seconds", "From request to first token", registry=registry, buckets=_TTFT
        )
        self._tpot = Histogram(
            "neuronmm_time_per_output_token_seconds", "Mean of the later tokens", registry=registry, buckets=_TPOT
        )
        self._prompt = Counter("neuronmm_prompt_tokens", "Prompt tokens of rows that began", registry=registry)
        self._output = Counter("neuronmm_output_tokens", "Generated tokens", registry=registry)
        self._drafted = Counter("neuronmm_draft_tokens", "Drafted tokens that were verified", registry=registry)
        self._accepted = Counter("neuronmm_draft_tokens_accepted", "Those that were accepted", registry=registry)
        self.requests = Counter(
            "neuronmm_requests", "Requests by status; 499: the client left", ["path", "status"], registry=registry
        )
        for name, text, value in (
            ("neuronmm_queue_length", "Rows that wait for a slot", lambda: scheduler.waiting),
            ("neuronmm_running_rows", "Rows in slots", lambda: scheduler.running),
        ):
            Gauge(name, text, registry=registry).set_function(value)

    def token(self, result: Generation) -> None:
        """Record the newest token of a row."""
        self._output.inc()
        if len(result.token_ids) == 1:
            self._ttft.observe(result.ttft)
            self._prompt.inc(result.prompt_tokens)

    def end(self, result: Generation) -> None:
        """Record a row that has ended or was cancelled."""
        if len(result.token_ids) > 1:
            self._tpot.observe(result.decode_seconds / (len(result.token_ids) - 1))
        if result.draft:
            self._drafted.inc(result.draft.drafted)
            self._accepted.inc(result.draft.accepted)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)
