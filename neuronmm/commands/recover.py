"""train a compressed checkpoint's factors against the dense model

examples:
  neuronmm recover llama-1b-low -o llama-1b-best
  neuronmm recover llama-1b-low -o llama-1b-wiki --calibration wiki.txt --calibration-rows 64 --calibration-length 1024
  neuronmm recover llama-1b-low -o llama-1b-lora --train lora --dense ./Llama-3.2-1B --resume
"""

from __future__ import annotations

import argparse
from functools import partial

from neuronmm.checkpoint_run import (
    FACTOR_DTYPE,
    add_factor_dtype,
    add_out,
    add_run_arguments,
    add_weight_dtype,
    run_and_report,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="compressed checkpoint: a folder or hub id; it does not change")
    add_out(parser)
    parser.add_argument(
        "--train",
        choices=("factors", "lora"),
        default="factors",
        help="the factors themselves, or LoRA adapters that are merged at the end (default factors)",
    )
    parser.add_argument(
        "--dense", metavar="MODEL", help="the dense model (default: the one that the checkpoint's report names)"
    )
    parser.add_argument(
        "--calibration",
        action="append",
        metavar="FILE|self|prose|code",
        help="text to train on; several share the rows (default: the calibration text of the compression)",
    )
    parser.add_argument(
        "--calibration-rows", type=int, metavar="N", help="rows of text (default: as in the compression)"
    )
    parser.add_argument(
        "--calibration-length", type=int, metavar="N", help="tokens per row (default: as in the compression)"
    )
    add_factor_dtype(parser)
    add_weight_dtype(parser)
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from neuronmm.compression.recover import recover

    dtype = {name: value for name in (*FACTOR_DTYPE, "weight_dtype") if (value := getattr(args, name)) is not None}
    recovery = partial(
        recover,
        args.model,
        args.out,
        args.train,
        dense=args.dense,
        calibration=args.calibration,
        calibration_rows=args.calibration_rows,
        calibration_length=args.calibration_length,
        **dtype,
    )
    run_and_report(args, recovery)
