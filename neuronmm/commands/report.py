"""write one HTML page about a compressed checkpoint: ratios, losses, quality, speed and predictions

The page is one file without script that needs no network. Measurements that other commands printed with --json are
added to it. An existing file is never replaced.

examples:
  neuronmm report OUT
  neuronmm report OUT --baseline MODEL --evaluation quality.json --benchmark speed.json -o out.html
  neuronmm report OUT --sweep sweep -o out.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from neuronmm.arguments import add_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="OUT", help="the folder of a compressed checkpoint")
    parser.add_argument("--baseline", metavar="MODEL", help="the dense model, for its sizes")
    add_files(parser, "--evaluation", "of evaluate --json")
    parser.add_argument("--benchmark", type=Path, metavar="FILE", help="of benchmark --json, on a CPU or a GPU")
    parser.add_argument("--sweep", type=Path, metavar="FOLDER", help="a sweep's folder, for its Pareto picture")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="file to write; default report.html"
    )


def run(args: argparse.Namespace) -> None:
    """Render the page and write it."""
    import shlex

    from neuronmm.measure.page import PageConfig, render
    from neuronmm.models.output import new_file, write_new

    config = PageConfig(args.model, args.baseline, args.evaluation, args.benchmark, args.sweep)
    out = new_file(args.out, config.inputs)
    words = ["neuronmm", "report", args.model]
    words += ["--baseline", args.baseline] if args.baseline else []
    words += ["--evaluation", *map(str, args.evaluation)] if args.evaluation else []
    words += ["--benchmark", str(args.benchmark)] if args.benchmark else []
    words += ["--sweep", str(args.sweep)] if args.sweep else []
    write_new(out, render(config, shlex.join([*words, "-o", str(args.out)])))
    print(out)
