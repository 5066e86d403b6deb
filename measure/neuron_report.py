"""Print the Neuron benchmark: measured, predicted and emulated figures in tables of their own."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from neuronmm.kernels.hardware import TRN1
from neuronmm.measure.neuron_benchmark import NeuronBenchmarkResult
from neuronmm.measure.statistics import MILLI, Spread, with_range


def print_neuron_benchmark(result: NeuronBenchmarkResult, console: Console) -> None:
    """Print the figures for the device as one table, and the time of an emulation as another."""
    console.print(f"model {result.model}, baseline {result.baseline or 'none'}")
    for name, kernels in result.kernels.items():
        console.print(f"{name}: {kernels}")
    cores = f"{result.cores} {TRN1.device} core(s)"
    if result.validation is None:
        console.print(f"measured on {cores}: {result.runs} runs of {result.new_tokens} tokens, median (min to max):")
        console.print(_table(result))
        return
    from neuronmm.emulator.timing.measured import CAVEAT

    console.print(f"predicted for {cores}, not measured:")
    console.print(_table(result, predicted=True))
    console.print(f"{CAVEAT} The model leaves out the {result.validation['left_out']}.")
    console.print(f"time of the emulation on this CPU ({result.new_tokens} tokens, one run), not of a device:")
    console.print(_table(result))


def _table(result: NeuronBenchmarkResult, predicted: bool = False) -> Table:
    """Return the table of the predictions, or of the runs' times."""
    table = Table("batch", "prompt", "variant")
    for column in ("TTFT ms (not validated)" if predicted else "TTFT ms", "TPOT ms", "decode tok/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in result.points:
        for name, figures in point.variants.items():
            times = figures.predicted if predicted and figures.predicted else figures.times
            tpot = times.tpot.median if isinstance(times.tpot, Spread) else times.tpot
            speed = f"{point.batch / tpot:.{1 if tpot < 1 else 3}f}"
            row = (str(point.batch), str(point.prompt_length), name)
            table.add_row(*row, _milliseconds(times.ttft), _milliseconds(times.tpot), speed)
    return table


def _milliseconds(time: float | Spread) -> str:
    return with_range(time, ".2f", MILLI) if isinstance(time, Spread) else f"{time / MILLI:.2f}"
