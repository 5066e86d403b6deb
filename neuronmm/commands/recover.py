"""train a compressed checkpoint's factors against the dense model

examples:
  neuronmm recover llama-1b-low -o llama-1b-best
  neuronmm recover llama-1b-low -o llama-1b-wiki --calibration wiki.txt --calibration-rows 64 --calibration-length 1024
  neuronmm recover llama-1b-low -o llama-1b-lora --train lora --dense ./Llama-3.2-1B --resume
"""

from __future__ import annotations

import argparse
from functools import partial

from neuronmm.checkpoint_run import add_run_arguments, run_and_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="compressed checkpoint: a folder, or hub id; it stays as it is")
    parser.add_argument(
        "-o", "--out", required=True, metavar="OUT", help="folder to write; complete or absent, never half"
    )
    parser.add_argument(
        "--train",
        choices=("factors", "lora"),
        default="factors",
        help="the factors themselves, or LoRA adapters on them, merged when done (default factors)",
    )
    parser.add_argument("--dense", help="model it was made from (default: where the checkpoint's report says)")
    parser.add_argument(
        "--calibration", metavar="FILE|self", help="text to train on (default: what the compression was fitted to)"
    )
    parser.add_argument("--calibration-rows", type=int, metavar="N", help="rows of it (default: as many as that had)")
    parser.add_argument("--calibration-length", type=int, metavar="N", help="tokens a row (default: as those had)")
    parser.add_argument(
        "--factors", choices=("model", "int8"), default="model", help="precision to store them in (default the model's)"
    )
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from neuronmm.compression.recover import recover

    make = partial(
        recover,
        args.model,
        args.out,
        args.train,
        dense=args.dense,
        calibration=args.calibration,
        calibration_rows=args.calibration_rows,
        calibration_length=args.calibration_length,
        factors=args.factors,
    )
    run_and_report(args, make)
