"""The benchmark: dense, naive two-GEMM and fused decoding, alternating in one process, with the read bandwidth.

A *point* is a batch size and a prompt length. At each point every variant runs once to warm up, which is reported
apart, and then once per *round*. A bandwidth probe runs before and after each round. Rounds that look disturbed are
flagged and stay in the figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from neuronmm.engine.backends import choose
from neuronmm.engine.backends.torch_runner import TorchRunner
from neuronmm.engine.decoder import Decoder
from neuronmm.engine.engine import pick_dtype
from neuronmm.measure.bandwidth import BandwidthProbe, factor_bytes, weight_bytes, weight_bytes_per_step
from neuronmm.measure.benchmark_result import (
    BenchmarkResult,
    Point,
    Round,
    Run,
    Variant,
    VariantRuns,
    probes,
    summarise_point,
)
from neuronmm.measure.config import BenchmarkConfig
from neuronmm.measure.machine import describe_machine, measure_growth
from neuronmm.measure.statistics import summarise
from neuronmm.models.errors import UserError
from neuronmm.models.load import positions_of
from neuronmm.models.low_bits import weight_dtype_of
from neuronmm.models.progress import Progress, no_progress
from neuronmm.models.source import difference, is_compressed, read_config, resolve
from neuronmm.models.spec import CompressionSpec

if TYPE_CHECKING:
    from neuronmm.measure.draft_benchmark import DraftBenchmarkResult
    from neuronmm.measure.neuron_benchmark import NeuronBenchmarkResult


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
    draft: str | Path | None = None,
    progress: Progress = no_progress,
    **options: Any,
) -> dict[str, Any]:
    """Measure every variant of ``model`` at every point and return the JSON document.

    The arguments are those of :class:`.BenchmarkConfig`, ``options`` the backend's own. See :func:`run_benchmark`.
    """
    config = BenchmarkConfig(
        model, baseline, prompt_lengths, new_tokens, batches, runs, dtype, threads, backend, options, draft
    )
    return run_benchmark(config, progress).to_json()


def run_benchmark(
    config: BenchmarkConfig, progress: Progress = no_progress
) -> BenchmarkResult | NeuronBenchmarkResult | DraftBenchmarkResult:
    """Measure every variant of ``config.model`` at every point, or decoding with ``config.draft`` beside plain.

    A compressed model has the variants ``naive`` (two GEMMs per linear) and ``fused`` (the fastest kernels for this
    machine), which share one copy of the weights, and ``dense`` if there is a baseline. A dense model has ``dense``.
    The option ``weight_dtype`` applies to ``fused``, adds the rounded dense model under the name of the dtype, and
    leaves out ``naive``, where torch would convert every weight in every step. Prompts are random tokens, the same for
    all variants; end-of-sequence tokens are ignored. ``progress`` is called only between measurements.

    Raises:
        UserError: the context is too short, or the models cannot be compared.
    """
    with _threads(config.threads):
        if config.draft is not None:
            from neuronmm.measure.draft_benchmark import benchmark_drafts

            return benchmark_drafts(config, progress)
        if config.backend == "neuron":
            from neuronmm.measure.neuron_benchmark import benchmark_neuron

            return benchmark_neuron(config, progress)
        choose(config.backend, config.options)
        return _benchmark(config, progress)


@dataclass(frozen=True)
class _Loaded:
    """A variant in memory."""

    runner: TorchRunner
    load_seconds: float
    step_bytes: int

    def describe(self) -> Variant:
        model = self.runner.model
        sizes = weight_bytes(model), self.step_bytes, factor_bytes(model)
        return Variant(self.runner.path, self.load_seconds, *sizes)


def _benchmark(config: BenchmarkConfig, progress: Progress) -> BenchmarkResult:
    folders = checkpoints(config, progress)
    folder = folders.get("fused") or folders["dense"]
    compression = _compression(folder)
    variants = _load(config, folders, pick_dtype(folder, config.dtype))
    runner = next(iter(variants.values())).runner
    context = positions_of(runner.model.config)
    if config.longest > context:
        raise UserError(
            f"{max(config.prompt_lengths)} prompt tokens and {config.new_tokens} new tokens exceed the model's context "
            f"of {context}; lower --prompt-lengths or --new-tokens"
        )
    probe = BandwidthProbe(max(variant.step_bytes for variant in variants.values()), runner.device)
    points = []
    for batch in config.batches:
        for length in config.prompt_lengths:
            advance = partial(progress, f"batch {batch}, prompt {length}")
            advance(0.0)
            prompt = _prompt(runner, batch, length)
            points.append(_measure_point(variants, probe, prompt, config, advance))
    return BenchmarkResult(
        model=str(config.model),
        baseline=str(config.baseline) if config.baseline else None,
        backend=choose(config.backend, config.options).name,
        compression=compression,
        machine=describe_machine(runner.device),
        dtype=str(runner.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        runs=config.runs,
        new_tokens=config.new_tokens,
        probe_bytes=probe.nbytes,
        read_bandwidth=summarise([bandwidth for point in points for bandwidth in probes(point.rounds)]),
        variants={name: variant.describe() for name, variant in variants.items()},
        points=points,
    )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def checkpoints(config: BenchmarkConfig, progress: Progress = no_progress) -> dict[str, Path]:
    """Return the checkpoint folders by variant: ``fused`` for a compressed model, ``dense`` for a dense one.

    Raises:
        UserError: a model cannot be read, the baseline is compressed or another model, or a dense model has one.
    """
    folder = resolve(config.model, progress)
    if not is_compressed(folder):
        if config.baseline is not None:
            raise UserError(f"{config.model} is a dense model; --baseline is for a compressed one")
        return {"dense": folder}
    if config.baseline is None:
        return {"fused": folder}
    baseline = resolve(config.baseline, progress)
    if is_compressed(baseline):
        raise UserError(f"{config.baseline} is a compressed model itself; --baseline has to be the dense one")
    other = difference(read_config(baseline), read_config(folder))
    if other is not None:
        raise UserError(f"{config.baseline} is not what {config.model} was made from ({other}); give its dense model")
    return {"dense": baseline, "fused": folder}


def _load(config: BenchmarkConfig, folders: dict[str, Path], dtype: torch.dtype) -> dict[str, _Loaded]:
    """Load the variants, in the order in which they are reported."""
    backend, rounded = choose(config.backend, config.options), config.options.get("weight_dtype")
    variants: dict[str, _Loaded] = {}
    if rounded and "dense" in folders:
        folders = {"dense": folders["dense"], rounded: folders["dense"], **folders}
    for name, folder in folders.items():
        start = time.perf_counter()
        runner = backend.load(folder, dtype, "auto", **({} if name == "dense" else config.options))
        seconds = time.perf_counter() - start
        if not isinstance(runner, TorchRunner):
            raise UserError(f"the benchmark does not run on backend {backend.name}; use cpu or cuda")
        step_bytes = weight_bytes_per_step(runner.model)
        if name == "fused" and weight_dtype_of(runner.model) is None:
            variants["naive"] = _Loaded(runner.sibling("naive"), seconds, step_bytes)  # the same weights
        variants[name] = _Loaded(runner, seconds, step_bytes)
    return variants


def _compression(folder: Path) -> CompressionSpec | None:
    """Return how the checkpoint in ``folder`` is compressed, None for a dense one."""
    block = read_config(folder).get("quantization_config")
    return None if block is None else CompressionSpec.parse(block, str(folder / "config.json"))


def _prompt(runner: TorchRunner, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(runner.model.config.vocab_size, (batch, length), generator=generator).to(runner.device)


def _measure_point(
    variants: dict[str, _Loaded],
    probe: BandwidthProbe,
    prompt: torch.Tensor,
    config: BenchmarkConfig,
    advance: Callable[[float], None],
) -> Point:
    """Warm up every variant, measure the rounds of one point and summarise them."""
    batch, length = prompt.shape
    fraction = 1 / (len(variants) * (config.runs + 1))
    decoders: dict[str, Decoder] = {}
    measured: dict[str, VariantRuns] = {}
    for name, variant in variants.items():
        start = time.perf_counter()
        decoder = decoders[name] = variant.runner.decoder(batch, length + config.new_tokens)
        measure(decoder, prompt, config.new_tokens)
        warm_up = time.perf_counter() - start
        # Two tokens reach the peak. The growth does not count what the first call allocates for good.
        growth = measure_growth(partial(measure, decoder, prompt, 2), prompt.device)
        peak = None if growth is None else weight_bytes(variant.runner.model) + decoder.state_bytes + growth
        measured[name] = VariantRuns([], warm_up, peak, variant.step_bytes)
        advance(fraction)
    rounds: list[Round] = []
    names = list(variants)
    for index in range(config.runs):
        before = probe()
        first = index % len(names)
        for name in names[first:] + names[:first]:
            measured[name].runs.append(measure(decoders[name], prompt, config.new_tokens))
            advance(fraction)
        rounds.append(Round(before, probe()))
    return summarise_point(batch, length, rounds, measured)


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
