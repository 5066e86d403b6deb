"""The common parts of the commands that write a checkpoint, or predict one: options, progress and report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

FACTOR_DTYPE = ("factor_dtype", "factors")
"""The names under which the parsed arguments hold the dtype of the factors; the second is the old one."""


def add_targets(parser: argparse.ArgumentParser) -> None:
    """Add the option for the linears to factorise."""
    parser.add_argument(
        "--targets", choices=("mlp", "attention", "all"), help="which linears to factorise (default all)"
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder of the new checkpoint."""
    parser.add_argument(
        "-o", "--out", required=True, metavar="OUT", help="folder to write; it appears when it is complete"
    )


def add_factor_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the option for the dtype of the factors, and its old name."""
    choices = ("model", "int8", "int4", "fp8")
    parser.add_argument(
        "--factor-dtype",
        choices=choices,
        help="dtype of the stored factors (default the model's); int4 needs the form two, fp8 is for Trainium",
    )
    parser.add_argument("--factors", choices=choices, help=argparse.SUPPRESS)


def add_weight_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the option for the dtype of the weights that are not factorised."""
    parser.add_argument(
        "--weight-dtype",
        choices=("model", "int8", "int4"),
        help="dtype of the stored weights that are not factorised; with either, embedding and head become int8 "
        "(default the model's)",
    )


def add_device(parser: argparse.ArgumentParser, does: str = "compute") -> None:
    """Add the option for the device; ``does`` is the verb of what runs there."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=f"where to {does} (default cpu)")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how to run, not what to write."""
    add_device(parser)
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a checkpoint that neuronmm wrote")
    parser.add_argument("--push", metavar="USER/NAME", help="upload OUT to a new, private repository of the hub")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON document instead of a table")


def run_and_report(args: argparse.Namespace, verb: Callable[..., dict[str, Any]]) -> None:
    """Call ``verb`` with the options of :func:`add_run_arguments` and progress bars, print its report, upload OUT."""
    from rich.console import Console
    from rich.table import Table

    from neuronmm.compression.push import check_push, push
    from neuronmm.compression.report import summary, warnings
    from neuronmm.compression.workspace import work_folder
    from neuronmm.models import processes
    from neuronmm.models.source import expanded
    from neuronmm.progress import stage_progress

    def state() -> str:
        work = work_folder(args.out)
        return f"the work so far is in {work}: repeat the command with --resume" if work.exists() else "nothing is kept"

    repo = args.push if processes.rank() == 0 else None
    if repo is not None:
        check_push(repo)
    try:
        with stage_progress() as progress:
            report = verb(resume=args.resume, force=args.force, device=args.device, progress=progress)
    except KeyboardInterrupt:
        print(f"interrupted; {state()}", file=sys.stderr)
        raise
    except processes.ProcessLost as error:
        raise processes.ProcessLost(f"{error}; {state()}") from None
    for warning in warnings(report):
        print(f"neuronmm: warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(report), flush=True)
    else:
        table = Table(title=f"{args.out}", show_header=False, title_justify="left")
        for what, value in summary(report):
            table.add_row(what, value)
        table.add_row("every matrix, and a sample of both models", f"{args.out}/compression_report.md")
        Console(markup=False).print(table)
    if repo is not None:
        print(f"uploaded, private: {push(expanded(args.out), report, repo)}", file=sys.stderr)
