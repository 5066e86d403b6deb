"""compress by several methods and ratios, measure each, and show what is worth choosing

examples:
  neuronmm sweep MODEL --text wikitext2.txt -o sweep
  neuronmm sweep MODEL --ratios 0.1,0.2,0.3 --methods svd,whitened --text wikitext2.txt c4.jsonl --speed -o sweep
  neuronmm sweep MODEL --ratios 0.1,0.2,0.3,0.4 --text wikitext2.txt -o sweep --resume

A method is one word or several joined by +, each the value of a setting of compress: svd, whitened, and so on. The
dense model is the reference. -o is a folder with every compressed checkpoint, sweep.json, sweep.md and the picture
sweep.png: perplexity against bytes and, with --speed, against measured tokens/s, the points that no other one beats
joined by a line. An interrupted sweep goes on with --resume; other ratios and methods than before are added to it, and
--speed, --tasks and further texts are measured of all its points. Nothing else should run on the machine with --speed.
The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from neuronmm.arguments import listed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the dense model: folder (safetensors), GGUF file, or hub id")
    parser.add_argument("-o", "--out", required=True, metavar="FOLDER", help="folder for the checkpoints and results")
    parser.add_argument(
        "--ratios",
        type=listed(float, "0.1,0.2"),
        default=(0.1, 0.2, 0.3),
        metavar="R,R",
        help="shares to remove; default 0.1,0.2,0.3",
    )
    parser.add_argument(
        "--methods",
        type=listed(str.strip, "svd"),
        default=("whitened",),
        metavar="M,M",
        help="METHOD[+SETTING...]; default whitened",
    )
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="texts for the perplexity")
    parser.add_argument("--targets", choices=("mlp", "attention", "all"), help="which linears (default mlp)")
    parser.add_argument("--calibration", metavar="FILE|self", help="as for compress (default self)")
    parser.add_argument("--recipe", type=Path, metavar="YAML", help="settings that all points share")
    parser.add_argument("--context", type=int, metavar="N", help="tokens a window; default as for evaluate")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N windows of each text")
    parser.add_argument("--tasks", type=Path, nargs="+", default=(), metavar="FILE", help="multiple-choice questions")
    parser.add_argument("--questions", type=int, metavar="N", help="only the first N questions of each task")
    parser.add_argument("--speed", action="store_true", help="measure tokens/s too, each beside the dense model")
    parser.add_argument("--resume", action="store_true", help="continue the sweep in FOLDER, or add points to it")
    parser.add_argument("--json", action="store_true", help="print the JSON document only, no table")


def run(args: argparse.Namespace) -> None:
    """Sweep, print."""
    from rich.console import Console
    from rich.table import Table

    from neuronmm.compression.config import BARE, CompressionConfig
    from neuronmm.measure.sweep import sweep
    from neuronmm.measure.sweep_table import notes, tables
    from neuronmm.progress import stage_bars

    bare = {} if args.recipe else BARE
    base = CompressionConfig.build(args.recipe, targets=args.targets, calibration=args.calibration, **bare)
    try:
        with stage_bars(live=not args.speed) as progress:
            result = sweep(
                args.model,
                args.out,
                args.ratios,
                args.methods,
                args.text,
                base,
                context=args.context,
                limit=args.limit,
                tasks=args.tasks,
                questions=args.questions,
                speed=args.speed,
                resume=args.resume,
                progress=progress,
            )
    except KeyboardInterrupt:
        print(f"interrupted; what is done is in {args.out}: repeat the command with --resume", file=sys.stderr)
        raise
    if not args.json:
        console = Console(highlight=False, markup=False)
        console = console if console.is_terminal else Console(highlight=False, markup=False, width=175)
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
    print(json.dumps(result))
