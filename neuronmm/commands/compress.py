"""compress a checkpoint by SVD into a low-rank checkpoint

examples:
  neuronmm compress meta-llama/Llama-3.2-1B -o llama-1b-low --budget balanced
  neuronmm compress ./Qwen3-4B -o qwen3-low --ratio 0.3 --targets all --calibration mine.txt --calibration self
  neuronmm compress SmolLM2.gguf -o smol-low --method svd --json
  neuronmm compress ./Qwen3-4B -o qwen3-int4 --ratio 0 --weight-dtype int4
  neuronmm compress ./Llama-3.1-8B -o llama-8b-low --recipe configs/default.yaml --resume
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from neuronmm.arguments import alignment
from neuronmm.checkpoint_run import (
    add_factor_dtype,
    add_out,
    add_run_arguments,
    add_targets,
    add_weight_dtype,
    run_and_report,
)

SHARE_A = ("off", "auto")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder (safetensors), GGUF file, or hub id")
    add_out(parser)
    parser.add_argument(
        "--ratio",
        type=float,
        help="fraction of the targeted weights to remove, 0.05 to 0.6 (default 0.15); "
        "0 with a --weight-dtype: round only",
    )
    parser.add_argument(
        "--budget",
        metavar="NATS|faithful|balanced",
        help="instead of a ratio, the largest distance from the dense model: KL divergence in nats per token on "
        "held-out calibration text (faithful: 0.05, balanced: 0.1); the largest ratio within it is measured",
    )
    add_targets(parser)
    parser.add_argument(
        "--method",
        choices=("svd", "asvd", "whitened", "fisher", "anchored"),
        help="closed form: plain SVD, scaled by activations, whitened by them, also by the gradients of the "
        "predictions (fisher), or anchored to the outputs of the dense model (default fisher)",
    )
    parser.add_argument(
        "--allocation",
        choices=("uniform", "global"),
        help="ranks: the same ratio for all linears, or by their spectra (default global)",
    )
    parser.add_argument(
        "--share-a", choices=SHARE_A, help="one A for q, k, v and for gate, up where it loses less (default auto)"
    )
    parser.add_argument("--share", choices=SHARE_A, help=argparse.SUPPRESS)  # the old name
    parser.add_argument(
        "--refine",
        choices=("off", "fast", "full"),
        help="train each block's factors and norms against the dense block (default fast)",
    )
    parser.add_argument(
        "--recover",
        choices=("off", "lora", "factors"),
        help="train the factors of the whole model, in memory, against the dense one: themselves or by LoRA "
        "(default off)",
    )
    parser.add_argument(
        "--form",
        choices=("two", "pivoted"),
        help="store a linear of rank r as two factors or, r^2 weights smaller, as r of its rows or columns and the "
        "coefficients of the others (default pivoted; two is predicted faster on several NeuronCores)",
    )
    add_factor_dtype(parser)
    add_weight_dtype(parser)
    parser.add_argument(
        "--align",
        type=alignment,
        metavar="auto|N",
        help="ranks are multiples of this tile (default auto: 128, less for a small linear)",
    )
    parser.add_argument(
        "--calibration",
        action="append",
        metavar="FILE|self|prose|code",
        help="text or .jsonl file, text sampled from the model itself, or the package's prose or code; several share "
        "the rows (default: prose, code and self)",
    )
    parser.add_argument("--recipe", type=Path, metavar="YAML", help="settings from a file; options override it")
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from neuronmm.compression.config import CompressionConfig
    from neuronmm.compression.pipeline import compress

    config = CompressionConfig.build(
        args.recipe,
        ratio=args.ratio,
        budget=args.budget,
        targets=args.targets,
        method=args.method,
        allocation=args.allocation,
        share=args.share,
        share_a=args.share_a,
        refine=args.refine,
        recover=args.recover,
        form=args.form,
        factors=args.factors,
        factor_dtype=args.factor_dtype,
        weight_dtype=args.weight_dtype,
        align=args.align,
        calibration=args.calibration,
    )
    run_and_report(args, partial(compress, args.model, args.out, config))
