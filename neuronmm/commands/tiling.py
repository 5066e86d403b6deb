"""choose and explain the block sizes of a low-rank kernel on Trainium

A linear is M,K,R,N: tokens, input features, rank, output features. An MLP is M,H,I,R: tokens, hidden size,
intermediate size, rank, or three ranks for gate, up and down. Times are predicted, not measured.

examples:
  neuronmm tiling --shape 4096,7168,4096,18432 --device trn1
  neuronmm tiling --mlp 2048,2560,9728,1664 --device trn2
  neuronmm tiling --mlp 1,2048,8192,1280,1280,1408 --json
"""

from __future__ import annotations

import argparse

from neuronmm.arguments import sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kernel = parser.add_mutually_exclusive_group(required=True)
    shape = sizes((4,), "M,K,R,N, such as 4096,7168,4096,18432")
    mlp = sizes((4, 6), "M,H,I,R or M,H,I,R,R,R, such as 1,2048,8192,1280")
    kernel.add_argument("--shape", type=shape, metavar="M,K,R,N", help="a linear: tokens, inputs, rank, outputs")
    kernel.add_argument("--mlp", type=mlp, metavar="M,H,I,R[,R,R]", help="an MLP: tokens, hidden, intermediate, ranks")
    parser.add_argument("--device", default="trn1", choices=("trn1", "trn2", "trn3"), help="default trn1")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def run(args: argparse.Namespace) -> None:
    import json
    from dataclasses import asdict

    from neuronmm.kernels.hardware import CORES
    from neuronmm.kernels.nki.problem import MlpProblem, Problem
    from neuronmm.kernels.nki.tiling import explain, solve

    problem: Problem | MlpProblem
    if args.mlp:
        tokens, hidden, intermediate, *ranks = args.mlp
        gate, up, down = ranks * (3 // len(ranks))
        problem = MlpProblem(tokens, hidden, intermediate, gate, up, down, args.dtype)
    else:
        tokens, inputs, rank, outputs = args.shape
        problem = Problem(tokens, inputs, rank, outputs, args.dtype)
    core = CORES[args.device]
    if args.json:
        print(json.dumps({"kind": "predicted", "what": "tiling", **asdict(solve(problem, core))}))
    else:
        print("\n".join(explain(problem, core)))
