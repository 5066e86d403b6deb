"""The benchmark: dense, naive two-GEMM and fused decoding, alternating in one process, with the bandwidth beside them.

A *point* is a batch size and a prompt length. At each point every variant first warms up (timed apart), then runs once
a *round*; a bandwidth probe stands before and after each round. Rounds that look disturbed are flagged, never dropped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from neuronmm.engine.backends import choose
from neuronmm.engine.backends.torch_runner import TorchRunner
from neuronmm.engine.decoder import Decoder
from neuronmm.engine.engine import pick_dtype
from neuronmm.measure.bandwidth import BandwidthProbe, factor_bytes, weight_bytes, weight_bytes_per_step
from neuronmm.measure.machine import describe_machine
from neuronmm.measure.memory import measure_growth
from neuronmm.measure.statistics import summarise, summarise_point
from neuronmm.models.errors import UserError
from neuronmm.models.source import read_config, resolve
from neuronmm.models.spec import CompressionSpec

MOST_ROWS, MOST_RUNS = 4096, 10_000
"""Bounds against a slip of the finger: rows at once, rounds."""


@dataclass
class Run:
    """One generation of one variant. Times in seconds: until the first token, and of each later token."""

    ttft: float
    steps: list[float]


def benchmark(
    model: str | Path,
    baseline: str | Path | None = None,
    *,
    prompt_lengths: Sequence[int] = (32, 512),
    new_tokens: int = 32,
    batches: Sequence[int] = (1,),
    runs: int = 5,
    dtype: str = "auto",
    threads: int | None = None,
    backend: str = "auto",
    progress: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Measure every variant of ``model`` at every point; the result is plain values, ready for JSON.

    A compressed ``model`` gives the variants ``naive`` (two GEMMs a linear) and ``fused`` (the fastest kernels that
    serve), which share one copy of the weights, and ``dense`` when there is a ``baseline``. A dense one gives
    ``dense``.
    Prompts are random tokens, the same for all variants; end-of-sequence tokens are ignored. ``options`` are the
    backend's own, as ``load`` takes them; :mod:`.neuron_benchmark` is what backend ``neuron`` runs.

    Raises:
        UserError: a number out of range, a context overflow, or models that cannot be compared.
    """
    _check(prompt_lengths, new_tokens, batches, runs, threads)
    if backend == "neuron":
        from neuronmm.measure.neuron_benchmark import benchmark_neuron

        with _threads(threads):
            return benchmark_neuron(
                model, baseline, prompt_lengths, new_tokens, batches, runs, dtype, progress, options
            )
    choose(backend, options)
    with _threads(threads):
        return _benchmark(model, baseline, prompt_lengths, new_tokens, batches, runs, dtype, backend, progress)


def _benchmark(
    model: str | Path,
    baseline: str | Path | None,
    prompt_lengths: Sequence[int],
    new_tokens: int,
    batches: Sequence[int],
    runs: int,
    dtype: str,
    backend: str,
    progress: bool,
) -> dict[str, Any]:
    """:func:`benchmark` once its numbers are known to be sane and the threads are set."""
    hosts, loading, facts = _load(model, baseline, dtype, backend)
    first = next(iter(hosts.values()))
    context = first.model.config.max_position_embeddings
    if max(prompt_lengths) + new_tokens > context:
        raise UserError(
            f"{max(prompt_lengths)} prompt tokens and {new_tokens} new tokens exceed the model's context of {context}; "
            "lower --prompt-lengths or --new-tokens"
        )
    step_bytes = {name: weight_bytes_per_step(host.model) for name, host in hosts.items()}
    probe = BandwidthProbe(max(step_bytes.values()), first.device)
    points = []
    total = len(batches) * len(prompt_lengths) * len(hosts) * (runs + 1)
    # No refresh of its own: a thread that draws would run beside what is measured.
    with Progress(console=Console(stderr=True), disable=not progress, auto_refresh=False) as bar:
        task = bar.add_task("benchmark", total=total)
        for batch in batches:
            for length in prompt_lengths:
                bar.update(task, description=f"batch {batch}, prompt {length}")
                points.append(_point(hosts, step_bytes, probe, batch, length, new_tokens, runs, bar, task))
    bandwidths = [r[when] for p in points for r in p["rounds"] for when in ("probe_before", "probe_after")]
    return {
        "kind": "measured",
        "what": "benchmark",
        **facts,
        "machine": describe_machine(first.device),
        "dtype": str(first.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "runs": runs,
        "new_tokens": new_tokens,
        "read_bandwidth": {"unit": "bytes/s", "buffer_bytes": probe.nbytes, **summarise(bandwidths)},
        "variants": {
            name: {
                "kernels": host.path,
                "load_seconds": loading[name],
                "weight_bytes": weight_bytes(host.model),
                "weight_bytes_per_token": step_bytes[name],
                "factor_bytes": factor_bytes(host.model),
            }
            for name, host in hosts.items()
        },
        "points": points,
    }


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check(
    prompt_lengths: Sequence[int], new_tokens: int, batches: Sequence[int], runs: int, threads: int | None
) -> None:
    processors = os.cpu_count() or 1
    checks = (
        (bool(prompt_lengths) and min(prompt_lengths) >= 1, "--prompt-lengths has to be one or more numbers above 0"),
        (bool(batches) and min(batches) >= 1 and max(batches) <= MOST_ROWS, f"--batch has to be 1 to {MOST_ROWS}"),
        (new_tokens >= 2, "--new-tokens has to be 2 or more: the first token is TTFT's, TPOT needs a second"),
        (1 <= runs <= MOST_RUNS, f"--runs has to be 1 to {MOST_RUNS}"),
        (threads is None or 1 <= threads <= processors, f"--threads has to be 1 to {processors}, the processors here"),
    )
    for good, message in checks:
        if not good:
            raise UserError(message)


def _load(
    model: str | Path, baseline: str | Path | None, dtype: str, backend: str
) -> tuple[dict[str, TorchRunner], dict[str, float], dict[str, Any]]:
    """The variants by name, in the order they are shown, their loading times, and the report's words on the models."""
    chosen = choose(backend)
    folder = resolve(model)
    torch_dtype = pick_dtype(folder, dtype)

    hosts: dict[str, TorchRunner] = {}
    loading: dict[str, float] = {}

    def load(name: str, where: Path) -> TorchRunner:
        start = time.perf_counter()
        host = chosen.load(where, torch_dtype, "auto")
        loading[name] = time.perf_counter() - start
        if not isinstance(host, TorchRunner):
            raise UserError(f"the benchmark does not run on backend {chosen.name}; use cpu or cuda")
        return host

    block = read_config(folder).get("quantization_config")
    facts: dict[str, Any] = {
        "model": str(model),
        "baseline": str(baseline) if baseline else None,
        "backend": chosen.name,
    }
    if block is None:
        if baseline is not None:
            raise UserError(f"{model} is a dense model; --baseline is for a compressed one")
        return {"dense": load("dense", folder)}, loading, {**facts, "compression": None}
    kept = {"method", "targets", "asked_ratio", "realised_ratio", "model_ratio", "align", "factors"}
    facts["compression"] = CompressionSpec.parse(block, str(folder / "config.json")).model_dump(include=kept)
    if baseline is not None:
        dense = resolve(baseline)
        if "quantization_config" in read_config(dense):
            raise UserError(f"{baseline} is a compressed model itself; --baseline has to be the dense one")
        hosts["dense"] = load("dense", dense)
    fused = load("fused", folder)
    hosts.update(naive=fused.sibling("naive"), fused=fused)
    loading["naive"] = loading["fused"]  # the very same weights
    if len({host.model.config.vocab_size for host in hosts.values()}) > 1:
        raise UserError(f"{model} and {baseline} have different vocabularies; they are not the same model")
    return hosts, loading, facts


def _point(
    hosts: dict[str, TorchRunner],
    step_bytes: dict[str, int],
    probe: BandwidthProbe,
    batch: int,
    length: int,
    new_tokens: int,
    runs: int,
    bar: Progress,
    task: TaskID,
) -> dict[str, Any]:
    """One batch size and prompt length: warm up, measure ``runs`` rounds, summarise."""
    first = next(iter(hosts.values()))
    generator = torch.Generator().manual_seed(0)
    vocabulary = first.model.config.vocab_size
    prompt = torch.randint(vocabulary, (batch, length), generator=generator).to(first.device)
    decoders, warm_ups, memory = {}, {}, {}
    for name, host in hosts.items():
        start = time.perf_counter()
        decoders[name] = host.decoder(batch, length + new_tokens)
        measure(decoders[name], prompt, new_tokens)
        warm_ups[name] = time.perf_counter() - start
        # Two tokens reach the peak, and what a first call sets up for good is no longer in the growth.
        growth = measure_growth(partial(measure, decoders[name], prompt, 2), first.device)
        fixed = weight_bytes(host.model) + decoders[name].state_bytes
        memory[name] = None if growth is None else fixed + growth
        _advance(bar, task)
    rounds: list[dict[str, Any]] = []
    measured: dict[str, list[Run]] = {name: [] for name in hosts}
    order = list(hosts)
    for index in range(runs):
        before = probe()
        for name in order[index % len(order) :] + order[: index % len(order)]:
            measured[name].append(measure(decoders[name], prompt, new_tokens))
            _advance(bar, task)
        rounds.append({"probe_before": before, "probe_after": probe()})
    return summarise_point(batch, length, rounds, measured, warm_ups, memory, step_bytes)


def _advance(bar: Progress, task: TaskID) -> None:
    bar.advance(task)
    bar.refresh()


def measure(decoder: Decoder, prompt: torch.Tensor, new_tokens: int) -> Run:
    """Generate greedily and time each token up to its arrival in main memory."""
    mask = torch.ones_like(prompt)
    times = [time.perf_counter()]
    tokens = decoder.prefill(prompt, mask).argmax(-1)
    for _ in range(new_tokens - 1):
        tokens.tolist()
        times.append(time.perf_counter())
        tokens = decoder.decode(tokens).argmax(-1)
    tokens.tolist()
    times.append(time.perf_counter())
    steps = [after - before for before, after in pairwise(times)]
    return Run(steps[0], steps[1:])
