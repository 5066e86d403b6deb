"""The benchmark on the Neuron backend: measured on a device; under emulation, predicted.

The time of an emulated run says how fast this CPU imitates a device, and nothing about the device. It is therefore
reported apart, as ``emulation``; the figures for the device are predictions of the timing model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from neuronmm.engine.backends import choose, neuron
from neuronmm.engine.backends.neuron import NeuronRunner
from neuronmm.engine.engine import pick_dtype
from neuronmm.kernels.hardware import TRN1
from neuronmm.measure.benchmark import checkpoints, measure
from neuronmm.measure.benchmark_result import Run
from neuronmm.measure.config import BenchmarkConfig
from neuronmm.measure.statistics import Spread, summarise
from neuronmm.models.progress import Progress, no_progress

EMULATED_TOKENS = 4
"""Tokens generated in the single emulated run."""


@dataclass
class NeuronTimes:
    """Seconds of the runs, and of compiling and loading the model. ``what`` says whose seconds they are."""

    what: str
    ttft: Spread
    tpot: Spread
    ready_seconds: float


@dataclass
class NeuronPrediction:
    """Seconds that the timing model predicts, and what they consist of, for TTFT and TPOT."""

    ttft: float
    tpot: float
    decode_tokens_per_second: float
    kernel_seconds: dict[str, float]
    collective_seconds: dict[str, float]
    hbm_bytes_read: dict[str, float]


@dataclass
class NeuronFigures:
    """One variant at one point: times of the device, or a prediction and the times of the emulation."""

    times: NeuronTimes
    predicted: NeuronPrediction | None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, in which every figure says whether it is measured, predicted or emulated."""
        if self.predicted is None:
            return {"measured": asdict(self.times)}
        return {"predicted": asdict(self.predicted), "emulation": asdict(self.times)}


@dataclass
class NeuronPoint:
    """One batch size and prompt length."""

    batch: int
    prompt_length: int
    variants: dict[str, NeuronFigures]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {**vars(self), "variants": {name: figures.to_json() for name, figures in self.variants.items()}}


@dataclass
class NeuronBenchmarkResult:
    """All that ``neuronmm benchmark --backend neuron`` reports. ``kernels``: what each variant ran, by name."""

    model: str
    baseline: str | None
    emulated: bool
    cores: int
    runs: int
    new_tokens: int
    kernels: dict[str, str]
    points: list[NeuronPoint]
    validation: dict[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "kind": "predicted" if self.emulated else "measured",
            "what": "benchmark",
            "model": self.model,
            "baseline": self.baseline,
            "backend": "neuron",
            "emulated": self.emulated,
            "device": TRN1.device,
            "cores": self.cores,
            "runs": self.runs,
            "new_tokens": self.new_tokens,
            "variants": {name: {"kernels": kernels} for name, kernels in self.kernels.items()},
            "points": [point.to_json() for point in self.points],
            "validation": self.validation,
        }


def benchmark_neuron(config: BenchmarkConfig, progress: Progress = no_progress) -> NeuronBenchmarkResult:
    """Run :func:`.run_benchmark` on this backend.

    A compressed model is ``fused``. A dense model and the baseline are ``dense``, the compiler's own dense path.

    Raises:
        UserError: the models cannot be compared, or an option is out of range.
    """
    choose("neuron", config.options)
    folders = checkpoints(config, progress)
    dtype = pick_dtype(list(folders.values())[-1], config.dtype)  # of the model, also for the baseline
    emulated = bool(config.options.get("emulate"))
    positions = config.longest
    if emulated:
        config = replace(config, new_tokens=min(config.new_tokens, EMULATED_TOKENS), runs=1)
    points: list[NeuronPoint] = []
    kernels: dict[str, str] = {}
    for batch in config.batches:
        options = {"n_positions": positions, **config.options, "batch_size": batch}
        runners = {name: neuron.load(folder, dtype, "auto", **options) for name, folder in folders.items()}
        for length in config.prompt_lengths:
            advance = partial(progress, f"batch {batch}, prompt {length}")
            advance(0.0)
            prompt = _prompt(runners, batch, length)
            runs = _measure_point(runners, prompt, config, advance, warm_ups=0 if emulated else 1)
            variants = {name: _figures(runner, batch, length, runs[name], emulated) for name, runner in runners.items()}
            points.append(NeuronPoint(batch, length, variants))
        kernels = {name: runner.path for name, runner in runners.items()}
        for runner in runners.values():
            runner.close()
    return NeuronBenchmarkResult(
        model=str(config.model),
        baseline=str(config.baseline) if config.baseline else None,
        emulated=emulated,
        cores=config.options.get("tp_degree", 1),
        runs=config.runs,
        new_tokens=config.new_tokens,
        kernels=kernels,
        points=points,
        validation=_validation() if emulated else None,
    )


def _prompt(runners: dict[str, NeuronRunner], batch: int, length: int) -> torch.Tensor:
    vocabulary = next(iter(runners.values())).shards.checkpoint.architecture.vocabulary
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


def _measure_point(
    runners: dict[str, NeuronRunner],
    prompt: torch.Tensor,
    config: BenchmarkConfig,
    advance: Callable[[float], None],
    warm_ups: int,
) -> dict[str, list[Run]]:
    """Run the variants in turn and return the runs of each, without the first ``warm_ups``."""
    batch, length = prompt.shape
    decoders = {name: runner.decoder(batch, length + config.new_tokens) for name, runner in runners.items()}
    runs: dict[str, list[Run]] = {name: [] for name in runners}
    rounds = warm_ups + config.runs
    for _ in range(rounds):
        for name, decoder in decoders.items():
            runs[name].append(measure(decoder, prompt, config.new_tokens))
            advance(1 / (len(runners) * rounds))
    return {name: variant_runs[warm_ups:] for name, variant_runs in runs.items()}


def _figures(runner: NeuronRunner, batch: int, length: int, runs: list[Run], emulated: bool) -> NeuronFigures:
    what = "seconds of this CPU" if emulated else "seconds of the device"
    ttft, tpot = summarise([run.ttft for run in runs]), summarise([run.tpot for run in runs])
    times = NeuronTimes(what, ttft, tpot, runner.ready_seconds)
    return NeuronFigures(times, _predict(runner, batch, length) if emulated else None)


def _predict(runner: NeuronRunner, batch: int, length: int) -> NeuronPrediction:
    """Predict the seconds on trn1 from the graphs that the host runs.

    A prompt is padded to the size of its graph. A continuous batch reads its prompts one after another.
    """
    from neuronmm.emulator.timing.graph import predict_graph

    prompt, token = (predict_graph(graph, TRN1) for graph in runner.adapter.graphs(runner.model, length))
    reads = batch if runner.continuous else 1
    return NeuronPrediction(
        ttft=reads * prompt.seconds,
        tpot=token.seconds,
        decode_tokens_per_second=batch / token.seconds,
        kernel_seconds={"ttft": reads * prompt.kernels, "tpot": token.kernels},
        collective_seconds={"ttft": reads * prompt.collectives, "tpot": token.collectives},
        hbm_bytes_read={"ttft": reads * prompt.hbm_read, "tpot": token.hbm_read},
    )


def _validation() -> dict[str, Any]:
    """Return the timing model's errors against published measurements, and what it leaves out."""
    from neuronmm.emulator.timing.measured import VALIDATION

    return {**VALIDATION, "left_out": "fusion of elementwise instructions: a long prefill comes out too slow"}
