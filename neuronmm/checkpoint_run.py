"""What the commands that write a checkpoint have in common: their options, their progress, their report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say how to run, not what to make."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute (default cpu)")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a checkpoint that neuronmm wrote")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON document instead of a table")


def run_and_report(args: argparse.Namespace, make: Callable[..., dict[str, Any]]) -> None:
    """Call ``make`` with what :func:`add_run_arguments` asked and a progress that draws, and print its report."""
    from rich.console import Console
    from rich.table import Table

    from neuronmm.compression.report import summary
    from neuronmm.compression.workspace import work_folder
    from neuronmm.progress import stage_progress

    try:
        with stage_progress() as progress:
            report = make(resume=args.resume, force=args.force, device=args.device, progress=progress)
    except KeyboardInterrupt:
        work = work_folder(args.out)
        kept = f"the work so far is in {work}: repeat the command with --resume" if work.exists() else "nothing is kept"
        print(f"interrupted; {kept}", file=sys.stderr)
        raise
    if args.json:
        print(json.dumps(report))
        return
    table = Table(title=f"{args.out}", show_header=False, title_justify="left")
    for what, value in summary(report):
        table.add_row(what, value)
    table.add_row("every matrix", f"{args.out}/compression_report.md")
    Console().print(table)
