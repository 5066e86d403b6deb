"""The Neuron benchmark as people read it: what is measured, what is predicted and what is emulation, each by itself."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from neuronmm.measure.figures import MILLI, with_range


def print_neuron_benchmark(result: dict[str, Any], console: Console) -> None:
    """Print the figures as one table; an emulation's own times stand in a table of their own."""
    console.print(f"model {result['model']}, baseline {result['baseline'] or 'none'}")
    for name, variant in result["variants"].items():
        console.print(f"{name}: {variant['kernels']}")
    where = f"{result['cores']} {result['device']} core(s)"
    if result["emulated"]:
        from neuronmm.emulator.timing.measured import CAVEAT

        console.print(f"predicted for {where}, not measured:")
        console.print(_table(result, "predicted"))
        console.print(f"{CAVEAT} The model leaves out the {result['validation']['left_out']}.")
        console.print(f"time of the emulation on this CPU ({result['new_tokens']} tokens, one run), not of a device:")
        console.print(_table(result, "emulation"))
    else:
        console.print(
            f"measured on {where}: {result['runs']} runs of {result['new_tokens']} tokens, median (min to max):"
        )
        console.print(_table(result, "measured"))


def _table(result: dict[str, Any], kind: str) -> Table:
    table = Table()
    for column in ("batch", "prompt", "variant"):
        table.add_column(column)
    ttft = "TTFT ms (not validated)" if kind == "predicted" else "TTFT ms"
    for column in (ttft, "TPOT ms", "decode tok/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in result["points"]:
        for name, variant in point["variants"].items():
            times = variant[kind]
            tpot = times["tpot"] if kind == "predicted" else times["tpot"]["median"]
            speed = f"{point['batch'] / tpot:.{1 if tpot < 1 else 3}f}"
            row = (str(point["batch"]), str(point["prompt_length"]), name)
            table.add_row(*row, _milliseconds(times["ttft"]), _milliseconds(times["tpot"]), speed)
    return table


def _milliseconds(time: Any) -> str:
    """A time, or the spread of several."""
    if isinstance(time, float):
        return f"{time * 1e3:.2f}"
    return with_range(time, ".2f", MILLI)
