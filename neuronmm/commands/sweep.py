"""compress by several methods and ratios, measure each, and compare the results

examples:
  neuronmm sweep MODEL --text wikitext2.txt -o sweep
  neuronmm sweep MODEL --ratios 0.1,0.2,0.3 --methods svd,whitened --text wikitext2.txt c4.jsonl --speed -o sweep
  neuronmm sweep MODEL --ratios 0.1,0.2,0.3,0.4 --text wikitext2.txt -o sweep --resume
  neuronmm sweep MODEL --methods fisher+global+share_a+pivoted+fast --text wikitext2.txt -o best

A method is one word or several joined by +, each a value of a setting of compress: svd, whitened, and so on. +int8 and
+int4 store all weights in few bits (pivoted factors in int8). Alone, int8 rounds the dense model, and int4 fits the
rounding to the calibration text. The dense model is the reference. The folder of -o receives every compressed
checkpoint, sweep.json, sweep.md and the picture sweep.png: perplexity against bytes and, with --speed, against measured
tokens/s, with a line along the Pareto front. --resume continues an interrupted sweep. It also adds ratios and methods
to a finished one, and measures --speed, --tasks and further texts of all its points. With --speed nothing else should
run on the machine. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from neuronmm.arguments import add_files, listed
from neuronmm.checkpoint_run import add_device, add_targets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", help="the dense model: folder (safetensors), GGUF file, or hub id")
    parser.add_argument("-o", "--out", required=True, metavar="FOLDER", help="folder for the checkpoints and results")
    parser.add_argument(
        "--ratios",
        type=listed(float, "0.1,0.2"),
        default=(0.1, 0.2, 0.3),
        metavar="R,R",
        help="fractions to remove; default 0.1,0.2,0.3",
    )
    parser.add_argument(
        "--methods",
        type=listed(str.strip, "svd"),
        default=("whitened",),
        metavar="M,M",
        help="METHOD[+SETTING...]; default whitened",
    )
    add_files(parser, "--text", "texts for the perplexity", required=True)
    add_targets(parser)
    parser.add_argument("--calibration", action="append", metavar="FILE|self|prose|code", help="as for compress")
    parser.add_argument("--recipe", type=Path, metavar="YAML", help="settings that all points share")
    parser.add_argument("--context", type=int, metavar="N", help="tokens per window; default as for evaluate")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N windows of each text")
    add_files(parser, "--tasks", "multiple-choice questions")
    parser.add_argument("--questions", type=int, metavar="N", help="only the first N questions of each task")
    parser.add_argument("--speed", action="store_true", help="also measure tokens/s, each point beside the dense model")
    add_device(parser, "compress")
    parser.add_argument("--resume", action="store_true", help="continue the sweep in FOLDER, or add points to it")
    parser.add_argument("--json", action="store_true", help="print the JSON document only, no table")


def run(args: argparse.Namespace) -> None:
    """Sweep and print."""
    from rich.table import Table

    from neuronmm.compression.config import BARE, CompressionConfig
    from neuronmm.measure.console import wide_console
    from neuronmm.measure.sweep import sweep
    from neuronmm.measure.sweep_config import SweepConfig
    from neuronmm.measure.sweep_table import notes, tables
    from neuronmm.progress import stage_progress

    base = CompressionConfig.build(args.recipe, usual=BARE, targets=args.targets, calibration=args.calibration)
    config = SweepConfig(
        ratios=args.ratios,
        methods=args.methods,
        texts=args.text,
        base=base,
        context=args.context,
        limit=args.limit,
        tasks=args.tasks,
        questions=args.questions,
        speed=args.speed,
    )
    try:
        with stage_progress(live=not args.speed) as progress:
            result = sweep(args.model, args.out, config, resume=args.resume, device=args.device, progress=progress)
    except KeyboardInterrupt:
        print(f"interrupted; the results so far are in {args.out}: repeat the command with --resume", file=sys.stderr)
        raise
    if not args.json:
        console = wide_console()
        for title, columns, rows in tables(result):
            table = Table(*columns, title=title, title_justify="left")
            for column in table.columns[1:]:
                column.justify, column.no_wrap = "right", True
            for row in rows:
                table.add_row(*row)
            console.print(table)
        for note in notes(result):
            console.print(note)
        console.print(f"checkpoints, sweep.md and sweep.png: {args.out}")
    print(json.dumps(result.to_json()))
