"""choose and explain the block sizes of a low-rank kernel on Trainium

The shape is M,K,R,N: tokens, input features, rank, output features. Times are modelled, not measured.

examples:
  neuronmm tiling --shape 4096,7168,4096,18432 --device trn1
  neuronmm tiling --shape 1,2048,1280,8192 --device trn2 --json
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", required=True, metavar="M,K,R,N", help="tokens, input features, rank, outputs")
    parser.add_argument("--device", default="trn1", choices=("trn1", "trn2", "trn3"), help="default trn1")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def run(args: argparse.Namespace) -> None:
    import json
    from dataclasses import asdict

    from neuronmm.kernels.hardware import CORES
    from neuronmm.kernels.tiling import Problem, explain, solve
    from neuronmm.models.errors import UserError

    sizes = args.shape.split(",")
    if len(sizes) != 4 or not all(size.strip().isdigit() for size in sizes):
        raise UserError(f"--shape {args.shape}: must be four positive numbers M,K,R,N, such as 4096,7168,4096,18432")
    tokens, inputs, rank, outputs = (int(size) for size in sizes)
    problem = Problem(tokens, inputs, rank, outputs, args.dtype)
    core = CORES[args.device]
    if args.json:
        print(json.dumps({**asdict(solve(problem, core)), "seconds_are": "predicted"}))
    else:
        print("\n".join(explain(problem, core)))
