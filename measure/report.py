"""The benchmark and the evaluation as people read them: tables on the terminal, JSON and a picture in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from neuronmm.kernels.durable import replacing
from neuronmm.measure.figures import MILLI, with_error, with_range
from neuronmm.measure.neuron_report import print_neuron_benchmark
from neuronmm.measure.picture import draw_benchmark
from neuronmm.models.documents import read_own, write_json
from neuronmm.models.errors import UserError
from neuronmm.models.output import Inputs, keep_apart, output_folder

_DOCUMENT, _PICTURE = "benchmark.json", "benchmark.png"
_WIDTH = 175


def print_benchmark(result: dict[str, Any]) -> None:
    """Print the measured figures as one table, with everything needed to read them."""
    if result["backend"] == "neuron":
        print_neuron_benchmark(result, _console())
        return
    console = _console()
    machine, bandwidth = result["machine"], result["read_bandwidth"]
    console.print(f"model {result['model']}, baseline {result['baseline'] or 'none'}{_compression(result)}")
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
    console.print(f"{machine['device']}, torch threads: {result['threads']}, {result['dtype']}, {versions}")
    for name, variant in result["variants"].items():
        megabytes = variant["weight_bytes_per_token"] / 1e6
        loaded = f"loaded in {variant['load_seconds']:.1f} s"
        factors = "".join(f", {n / 1e6:.1f} of them {kind} factors" for kind, n in variant["factor_bytes"].items())
        kernels = variant["kernels"]
        console.print(f"{name}: {megabytes:.1f} MB of weights a token{factors}; kernels: {kernels}; {loaded}")
    console.print(
        f"read bandwidth {with_range(bandwidth, '.1f', 1e9)} GB/s over {bandwidth['buffer_bytes'] / 1e6:.0f} MB"
    )
    table = Table(title=f"measured: {result['runs']} runs of {result['new_tokens']} tokens, median (min to max)")
    for column in ("batch", "prompt", "variant", "factors"):
        table.add_column(column)
    for column in (
        "TTFT ms",
        "TPOT ms",
        "p90",
        "decode tok/s",
        "limit",
        "share",
        "prefill tok/s",
        "peak MB",
        "warm-up s",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for point in result["points"]:
        for name, figures in point["variants"].items():
            memory = figures["peak_memory_bytes"]
            table.add_row(
                str(point["batch"]),
                str(point["prompt_length"]),
                name,
                ", ".join(result["variants"][name]["factor_bytes"]) or "none",
                with_range(figures["ttft"], ".1f", MILLI),
                with_range(figures["tpot"], ".1f", MILLI),
                f"{figures['tpot']['p90'] * 1e3:.1f}",
                f"{figures['decode_tokens_per_second']:.1f}",
                f"{figures['limit_tokens_per_second']:.0f}",
                f"{figures['bandwidth_share']:.0%}",
                f"{figures['prefill_tokens_per_second']:.0f}",
                "unknown" if memory is None else f"{memory / 1e6:.0f}",
                f"{figures['warm_up_seconds']:.1f}",
            )
        table.add_section()
    console.print(table)
    console.print("limit: tokens/s at which reading the weights once a step takes the whole measured bandwidth")
    stalled = sum(entry["stalled"] for point in result["points"] for entry in point["rounds"])
    if stalled:
        console.print(f"{stalled} of {len(result['points']) * result['runs']} rounds look disturbed; they are included")


def results_folder(out: str | Path, inputs: Inputs) -> Path:
    """The folder for :func:`write_benchmark`, made if it is missing.

    Raises:
        UserError: it cannot be written, lies in a model of ``inputs``, or holds files of those names that no benchmark
            wrote.
    """
    folder = output_folder(out)
    keep_apart(folder, inputs, may_hold=True)
    there = [name for name in (_DOCUMENT, _PICTURE) if os.path.lexists(folder / name)]
    if there and (read_own(folder / _DOCUMENT) or {}).get("what") != "benchmark":
        raise UserError(f"{folder / there[0]}: was not written by benchmark; move it, or give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); give another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: is read-only; give another folder")
    return folder


def write_benchmark(result: dict[str, Any], folder: Path) -> None:
    """Write ``benchmark.json`` and, but for backend neuron, ``benchmark.png`` into ``folder``, which exists."""
    write_json(folder / _DOCUMENT, result)
    if result["backend"] != "neuron":
        with replacing(folder / _PICTURE) as new:
            draw_benchmark(result, new)


def print_evaluation(result: dict[str, Any]) -> None:
    """Print perplexities and accuracies, one column a model and one for the paired difference."""
    console = _console()
    names = list(result["models"])
    table = Table(title="measured (± one standard error)")
    table.add_column("measure")
    for name in names:
        table.add_column(name, justify="right")
    if len(names) > 1:
        table.add_column("paired difference", justify="right")
    for row in result["results"]:
        cells = [with_error(row["models"][name]) for name in names]
        if len(names) > 1:
            cells.append(with_error(row["difference"], sign="+"))
        table.add_row(row["measure"], *cells)
    for name, model in result["models"].items():
        console.print(f"{name}: {model['path']}, {model['dtype']}")
    console.print(table)
    for note in result["notes"]:
        console.print(note)


def _console() -> Console:
    """Wide enough for the tables wherever the output goes."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_WIDTH)


def _compression(result: dict[str, Any]) -> str:
    block = result["compression"]
    if block is None:
        return ""
    return f", {block['method']} on {block['targets']}: ratio asked {block['asked_ratio']:.3g}, realised " + (
        f"{block['realised_ratio']:.3f} of the targets, {block['model_ratio']:.3f} of the model"
    )
