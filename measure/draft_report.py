"""Print the benchmark of drafts: speed and acceptance by prompt, and the break-even by draft length."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from neuronmm.measure.draft_benchmark import DraftBenchmarkResult
from neuronmm.measure.statistics import MILLI, with_range


def print_draft_benchmark(result: DraftBenchmarkResult, console: Console) -> None:
    """Print two tables, with the facts needed to read them."""
    versions = ", ".join(f"{name} {value}" for name, value in result.machine.versions.items())
    console.print(f"model {result.model}, draft {result.draft}; kernels: {result.kernels}")
    console.print(f"{result.machine.device}, torch threads: {result.threads}, {result.dtype}, {versions}")
    table = Table(title=f"measured: {result.runs} rounds of {result.new_tokens} tokens, median (min to max)")
    table.add_column("prompt")
    for column in ("plain tok/s", "with drafts tok/s", "speedup", "accepted", "tokens per step"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, figures in result.prompts.items():
        accepted = "none drafted" if figures.acceptance is None else f"{figures.acceptance:.0%} of {figures.drafted}"
        table.add_row(
            name,
            with_range(figures.plain_tokens_per_second, ".1f"),
            with_range(figures.drafted_tokens_per_second, ".1f"),
            with_range(figures.speedup, ".2f"),
            accepted,
            f"{figures.tokens_per_step:.2f}",
        )
    console.print(table)
    steps = Table("drafted per step", "step and draft ms", "pays from accepted tokens")
    for step in result.steps:
        steps.add_row(str(step.drafted), f"{step.seconds / MILLI:.1f}", f"{step.break_even:.2f}")
    console.print(steps)
    console.print("both texts are equal, token by token")
