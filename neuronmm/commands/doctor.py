"""say what this machine has, which backend and kernels run on it, and what to do about what is missing

The last check generates a few tokens with a tiny random model and compares them with the reference kernels. The exit
status is 0 if that works, else 1.

examples:
  neuronmm doctor
  neuronmm doctor --json
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")


def run(args: argparse.Namespace) -> None:
    """Diagnose, print, and end with status 1 if nothing can be generated."""
    import json
    import sys

    from neuronmm.measure.diagnosis import diagnose

    diagnosis = diagnose()
    if args.json:
        print(json.dumps(diagnosis.to_json()))
    else:
        from rich.table import Table

        from neuronmm.measure.console import wide_console

        table = Table("", "found", "what to do")
        for finding in diagnosis.findings:
            table.add_row(finding.what, finding.found, finding.advice or "")
        console = wide_console()
        console.print(table)
        if diagnosis.problem is None:
            gpu = "a" if diagnosis.backend == "cuda" else "no"
            console.print(f"generation works; --backend auto chooses {diagnosis.backend}, because torch sees {gpu} GPU")
            console.print(f"kernels in bf16: {diagnosis.kernels}")
    if diagnosis.problem is not None:
        print(f"neuronmm doctor: generation does not work here: {diagnosis.problem}", file=sys.stderr)
        raise SystemExit(1)
