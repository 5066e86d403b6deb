"""show what a model consists of: parameters, bytes, forms and ranks, and what a ratio would remove

No weight is loaded: config.json and the headers of the weights say it, in a second; a hub id is downloaded first. For a
dense model the last table shows what each ratio removes from each choice of targets, with uniform ranks in the default
form.

examples:
  neuronmm inspect meta-llama/Llama-3.2-1B
  neuronmm inspect SmolLM2.gguf
  neuronmm inspect llama-1b-low --json
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from neuronmm.measure.inspection import FactorisedLinear, Inspection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", help="a model folder (compressed or dense), a GGUF file or a hub id")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the tables")


def run(args: argparse.Namespace) -> None:
    """Inspect and print."""
    import json

    from neuronmm.measure.inspection import inspect

    result = inspect(args.model)
    if args.json:
        print(json.dumps(result.to_json()))
        return
    from neuronmm.measure.console import wide_console
    from neuronmm.models.errors import printable

    console = wide_console()
    config, spec = result.config, result.spec
    console.print(
        f"{printable(result.model)}: {config.model_type}, {config.num_hidden_layers} layers, hidden size "
        f"{config.hidden_size}, MLP {config.intermediate_size}, {config.num_attention_heads} heads of {config.head} "
        f"({config.kv_heads} KV), vocabulary {config.vocab_size:,}"
    )
    if spec is not None and spec.weights != "model":
        console.print(f"dense weights: {spec.weights}, embedding and head int8")
    if spec is not None and spec.ranks:
        removed = 1 - sum(result.parameters.values()) / result.dense_parameters
        console.print(
            f"compressed: {printable(spec.method)}, {printable(spec.targets)}; ratio asked {spec.asked_ratio:.2%}, "
            f"realised {spec.realised_ratio:.2%} of the targeted weights; {removed:.2%} of the model; ranks in "
            f"multiples of {spec.align}; neuronmm {printable(spec.version)}"
        )
    console.print(_parameters(result))
    if spec is None or spec.ranks:
        console.print(_worth(result) if spec is None else _ranks(result))


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _parameters(result: Inspection) -> Table:
    """Return the parameters by kind, and below them the bytes by dtype."""
    total = sum(result.parameters.values())
    table = _table("", "", "parameters", "share")
    for kind, count in result.parameters.items():
        tied = kind == "head" and not count
        table.add_row(kind, "the embedding" if tied else f"{count:,}", "" if tied else f"{count / total:.1%}")
    table.add_row("all", f"{total:,}", "", end_section=True)
    for dtype, size in result.bytes.items():
        table.add_row(f"stored as {dtype}", f"{size / 1e6:,.1f} MB", f"{size / sum(result.bytes.values()):.1%}")
    return table


def _ranks(result: Inspection) -> Table:
    """Return the form and rank of every linear, one row per layer."""
    from neuronmm.models.families import LINEARS

    table = _table("rank of each linear; p: pivoted, =x: with the A of x, -: dense", "layer", *LINEARS)
    cells = {(linear.layer, linear.linear): _cell(linear) for linear in result.linears}
    for layer in range(result.config.num_hidden_layers):
        table.add_row(str(layer), *(cells.get((layer, short), "-") for short in LINEARS))
    return table


def _cell(linear: FactorisedLinear) -> str:
    shared = f" ={linear.shares_a_of}" if linear.shares_a_of else ""
    return f"{linear.rank}{' p' if linear.form == 'pivoted' else ''}{shared}"


def _worth(result: Inspection) -> Table:
    """Return what the ratios remove from the targets."""
    columns = ("asked", "realised", "ranks", "parameters removed", "MB removed", "of the model")
    table = _table("what compress would remove (uniform ranks, pivoted form)", "targets", *columns)
    for row in result.worth:
        table.add_row(
            row.targets,
            f"{row.ratio:.0%}",
            f"{row.realised:.1%}",
            " to ".join(map(str, sorted(set(row.ranks)))),
            f"{row.removed_parameters:,}",
            f"{row.removed_bytes / 1e6:,.1f}",
            f"{row.of_model:.1%}",
        )
    return table
