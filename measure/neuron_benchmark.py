"""The benchmark on the Neuron backend: measured on a device; emulated, predicted times and the emulation's own, apart.

An emulation says how long this CPU takes to imitate a device, which says nothing about the device: its times carry that
name, and the figures for the device are the timing model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from neuronmm.engine.backends import choose, neuron
from neuronmm.engine.backends.neuron import NeuronRunner
from neuronmm.engine.engine import pick_dtype
from neuronmm.kernels.hardware import TRN1
from neuronmm.measure.benchmark import Run, measure
from neuronmm.measure.statistics import summarise
from neuronmm.models.errors import UserError
from neuronmm.models.source import read_config, resolve

EMULATED_TOKENS = 4
"""New tokens of an emulated run, and it is one: enough to see the emulation's speed."""


def benchmark_neuron(
    model: str | Path,
    baseline: str | Path | None,
    prompt_lengths: Sequence[int],
    new_tokens: int,
    batches: Sequence[int],
    runs: int,
    dtype: str,
    progress: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The result of :func:`.benchmark.benchmark` for this backend, ready for JSON.

    A compressed ``model`` is ``fused``, a dense one and the ``baseline`` are ``dense``: the compiler's own dense path.

    Raises:
        UserError: models that cannot be compared, or an option out of range.
    """
    choose("neuron", options)
    folders = _folders(model, baseline)
    emulated = bool(options.get("emulate"))
    tokens, rounds = (min(new_tokens, EMULATED_TOKENS), 1) if emulated else (new_tokens, runs)
    longest = max(prompt_lengths) + new_tokens
    points: list[dict[str, Any]] = []
    paths: dict[str, str] = {}
    with Progress(console=Console(stderr=True), disable=not progress, auto_refresh=False) as bar:
        task = bar.add_task("benchmark", total=len(batches) * len(prompt_lengths))
        for batch in batches:
            asked = {"n_positions": longest, **options, "batch_size": batch}
            hosts = {
                name: neuron.load(folder, pick_dtype(folder, dtype), "auto", **asked)
                for name, folder in folders.items()
            }
            for length in prompt_lengths:
                points.append(_point(hosts, batch, length, tokens, rounds, emulated))
                bar.advance(task)
                bar.refresh()
            paths = {name: host.path for name, host in hosts.items()}
            for host in hosts.values():
                host.close()
    return {
        "kind": "predicted" if emulated else "measured",
        "what": "benchmark",
        "model": str(model),
        "baseline": str(baseline) if baseline else None,
        "backend": "neuron",
        "emulated": emulated,
        "device": TRN1.device,
        "cores": options.get("tp_degree", 1),
        "runs": rounds,
        "new_tokens": tokens,
        "variants": {name: {"kernels": path} for name, path in paths.items()},
        "points": points,
        "validation": _validation() if emulated else None,
    }


def _folders(model: str | Path, baseline: str | Path | None) -> dict[str, Path]:
    """The variants' checkpoints by name."""
    folder = resolve(model)
    if "quantization_config" not in read_config(folder):
        if baseline is not None:
            raise UserError(f"{model} is a dense model; --baseline is for a compressed one")
        return {"dense": folder}
    if baseline is None:
        return {"fused": folder}
    dense = resolve(baseline)
    if "quantization_config" in read_config(dense):
        raise UserError(f"{baseline} is a compressed model itself; --baseline has to be the dense one")
    return {"dense": dense, "fused": folder}


def _point(
    hosts: dict[str, NeuronRunner], batch: int, length: int, tokens: int, rounds: int, emulated: bool
) -> dict[str, Any]:
    """One batch size and prompt length; on a device the variants alternate, after a run each to warm up."""
    vocabulary = min(host.shards.checkpoint.architecture.vocabulary for host in hosts.values())
    prompt = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    decoders = {name: host.decoder(batch, length + tokens) for name, host in hosts.items()}
    measured: dict[str, list[Run]] = {name: [] for name in hosts}
    for index in range(rounds if emulated else rounds + 1):
        for name, decoder in decoders.items():
            run = measure(decoder, prompt, tokens)
            if emulated or index:
                measured[name].append(run)
    variants = {}
    for name, host in hosts.items():
        times = {
            "ttft": summarise([run.ttft for run in measured[name]]),
            "tpot": summarise([sum(run.steps) / len(run.steps) for run in measured[name]]),
            "ready_seconds": host.ready_seconds,
        }
        variants[name] = (
            {"predicted": _predict(host, batch, length), "emulation": {"what": "seconds of this CPU", **times}}
            if emulated
            else {"measured": {"what": "seconds of the device", **times}}
        )
    return {"batch": batch, "prompt_length": length, "variants": variants}


def _predict(host: NeuronRunner, batch: int, length: int) -> dict[str, Any]:
    """Predicted seconds on trn1, from the graphs the host runs: a prompt is padded to the size of its graph.

    In a continuous batch prompts are read one after the other.
    """
    from neuronmm.emulator.timing.graph import predict_graph

    prompt, token = (predict_graph(graph, TRN1) for graph in host.adapter.graphs(host.model, length))
    reads = batch if host.continuous else 1
    return {
        "ttft": reads * prompt.seconds,
        "tpot": token.seconds,
        "decode_tokens_per_second": batch / token.seconds,
        "kernel_seconds": {"ttft": reads * prompt.kernels, "tpot": token.kernels},
        "collective_seconds": {"ttft": reads * prompt.collectives, "tpot": token.collectives},
        "hbm_bytes_read": {"ttft": reads * prompt.hbm_read, "tpot": token.hbm_read},
    }


def _validation() -> dict[str, Any]:
    """How far the timing model is from what is published, and what it leaves out."""
    from neuronmm.emulator.timing.measured import VALIDATION

    return {**VALIDATION, "left_out": "fusion of elementwise instructions: a long prefill comes out too slow"}
