"""Print the benchmark and the evaluation as tables, and write the benchmark's JSON document and picture to a folder."""

from __future__ import annotations

import os
from pathlib import Path

from rich.table import Table

from neuronmm.kernels.durable import replacing
from neuronmm.measure.benchmark_result import BenchmarkResult
from neuronmm.measure.console import wide_console
from neuronmm.measure.draft_benchmark import DraftBenchmarkResult
from neuronmm.measure.draft_report import print_draft_benchmark
from neuronmm.measure.evaluate import EvaluationResult
from neuronmm.measure.neuron_benchmark import NeuronBenchmarkResult
from neuronmm.measure.neuron_report import print_neuron_benchmark
from neuronmm.measure.picture import draw_benchmark
from neuronmm.measure.statistics import MILLI, with_error, with_range
from neuronmm.models.documents import read_own, write_json
from neuronmm.models.errors import UserError
from neuronmm.models.output import Inputs, keep_apart, output_folder

_DOCUMENT, _PICTURE = "benchmark.json", "benchmark.png"


def print_benchmark(result: BenchmarkResult | NeuronBenchmarkResult | DraftBenchmarkResult) -> None:
    """Print the figures as tables, with the facts needed to read them."""
    console = wide_console()
    if isinstance(result, DraftBenchmarkResult):
        print_draft_benchmark(result, console)
        return
    if isinstance(result, NeuronBenchmarkResult):
        print_neuron_benchmark(result, console)
        return
    console.print(f"model {result.model}, baseline {result.baseline or 'none'}{_compression(result)}")
    versions = ", ".join(f"{name} {value}" for name, value in result.machine.versions.items())
    console.print(f"{result.machine.device}, torch threads: {result.threads}, {result.dtype}, {versions}")
    for name, variant in result.variants.items():
        megabytes = variant.weight_bytes_per_token / 1e6
        loaded = f"loaded in {variant.load_seconds:.1f} s"
        factors = "".join(f", {n / 1e6:.1f} of them {kind} factors" for kind, n in variant.factor_bytes.items())
        console.print(f"{name}: {megabytes:.1f} MB of weights per token{factors}; kernels: {variant.kernels}; {loaded}")
    bandwidth = with_range(result.read_bandwidth, ".1f", 1e9)
    console.print(f"read bandwidth {bandwidth} GB/s over {result.probe_bytes / 1e6:.0f} MB")
    console.print(_benchmark_table(result))
    console.print("limit: tokens/s at which reading the weights once per step takes the whole measured bandwidth")
    stalled = sum(entry.stalled for point in result.points for entry in point.rounds)
    if stalled:
        console.print(f"{stalled} of {len(result.points) * result.runs} rounds look disturbed; they are included")


def _benchmark_table(result: BenchmarkResult) -> Table:
    table = Table(title=f"measured: {result.runs} runs of {result.new_tokens} tokens, median (min to max)")
    for column in ("batch", "prompt", "variant", "factors"):
        table.add_column(column)
    figures = ("TTFT ms", "TPOT ms", "p90", "decode tok/s", "limit", "share", "prefill tok/s", "peak MB", "warm-up s")
    for column in figures:
        table.add_column(column, justify="right", no_wrap=True)
    for point in result.points:
        for name, variant in point.variants.items():
            memory = variant.peak_memory_bytes
            table.add_row(
                str(point.batch),
                str(point.prompt_length),
                name,
                ", ".join(result.variants[name].factor_bytes) or "none",
                with_range(variant.ttft, ".1f", MILLI),
                with_range(variant.tpot, ".1f", MILLI),
                f"{variant.tpot.p90 / MILLI:.1f}",
                f"{variant.decode_tokens_per_second:.1f}",
                f"{variant.limit_tokens_per_second:.0f}",
                f"{variant.bandwidth_share:.0%}",
                f"{variant.prefill_tokens_per_second:.0f}",
                "unknown" if memory is None else f"{memory / 1e6:.0f}",
                f"{variant.warm_up_seconds:.1f}",
            )
        table.add_section()
    return table


def results_folder(out: str | Path, inputs: Inputs) -> Path:
    """Return the folder for :func:`write_benchmark`, created if it is missing.

    Raises:
        UserError: the folder cannot be written, lies in a model of ``inputs``, or holds files of the same names that no
            benchmark wrote.
    """
    folder = output_folder(out)
    keep_apart(folder, inputs, may_hold=True)
    old = read_own(folder / _DOCUMENT) or {}
    ours = old.get("what") == "benchmark"
    drawn = ours and "draft" not in old and old.get("backend") != "neuron"
    for name, own in ((_DOCUMENT, ours), (_PICTURE, drawn)):
        if not own and os.path.lexists(folder / name):
            raise UserError(f"{folder / name}: was not written by benchmark; move it, or give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be created ({error.strerror}); give another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: is read-only; give another folder")
    return folder


def write_benchmark(result: BenchmarkResult | NeuronBenchmarkResult | DraftBenchmarkResult, folder: Path) -> None:
    """Write ``benchmark.json`` and, of variants on a CPU or a GPU, ``benchmark.png`` to ``folder``, which exists."""
    write_json(folder / _DOCUMENT, result.to_json())
    if isinstance(result, BenchmarkResult):
        with replacing(folder / _PICTURE) as new:
            draw_benchmark(result, new)
    else:
        (folder / _PICTURE).unlink(missing_ok=True)  # of an earlier benchmark, whose figures are gone


def print_evaluation(result: EvaluationResult) -> None:
    """Print perplexities and accuracies: one column per model, and one for the paired difference."""
    console = wide_console()
    table = Table(title="measured (± one standard error)")
    table.add_column("measure")
    for column in [*result.models, *(["paired difference"] if len(result.models) > 1 else [])]:
        table.add_column(column, justify="right")
    for row in result.results:
        cells = [with_error(row.models[name]) for name in result.models]
        if row.difference is not None:
            cells.append(with_error(row.difference, sign="+"))
        table.add_row(row.measure, *cells)
    for name, model in result.models.items():
        console.print(f"{name}: {model.path}, {model.dtype}")
    console.print(table)
    for note in result.notes:
        console.print(note)


def _compression(result: BenchmarkResult) -> str:
    spec = result.compression
    if spec is None:
        return ""
    rounded = "" if spec.weights == "model" else f", dense weights in {spec.weights}"
    if not spec.ranks:
        return rounded
    return rounded + (
        f", {spec.method} on {spec.targets}: ratio asked {spec.asked_ratio:.3g}, realised "
        f"{spec.realised_ratio:.3f} of the targets, {spec.model_ratio:.3f} of the model"
    )
