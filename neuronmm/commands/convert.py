"""write a compressed checkpoint in the other form of its factors, the same function in fewer or more bytes

examples:
  neuronmm convert llama-1b-low -o llama-1b-small
  neuronmm convert llama-1b-low -o llama-1b-small --form pivoted --resume
  neuronmm convert llama-1b-small -o llama-1b-two --form two --json
"""

from __future__ import annotations

import argparse
from functools import partial

from neuronmm.checkpoint_run import add_out, add_run_arguments, run_and_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="compressed checkpoint: a folder or hub id; it does not change")
    add_out(parser)
    parser.add_argument(
        "--form",
        choices=("two", "pivoted"),
        default="pivoted",
        help="two plain factors, or r^2 weights fewer: r rows or columns of each matrix and the coefficients of the "
        "others (default pivoted)",
    )
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from neuronmm.compression.convert import convert

    run_and_report(args, partial(convert, args.model, args.out, args.form))
