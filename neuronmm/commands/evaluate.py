"""measure a model's quality: perplexity on a text, accuracy on multiple-choice tasks

examples:
  neuronmm evaluate OUT --text wikitext2.txt
  neuronmm evaluate OUT --baseline MODEL --text wikitext2.txt --context 2048
  neuronmm evaluate MODEL --baseline MODEL --weight-dtype int4 --text wikitext2.txt     (what rounding costs)
  neuronmm evaluate OUT --baseline MODEL --tasks hellaswag.jsonl piqa.jsonl --limit 200

--text is raw text, or a .jsonl file with one {"text": ...} object per line; the texts are joined by blank lines. The
tokens are cut into windows of --context tokens (default: 2048, or the model's maximum if that is less), as in the
literature. --tasks are JSON lines {"id", "query", "choices", "gold"}; each choice replaces a `_` in a query, and the
text after it is scored. --baseline adds a second model and the paired difference of both. The last line of stdout is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from neuronmm.arguments import Once, add_files
from neuronmm.commands.generate import add_dtype, add_weight_dtype


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="OUT", help="a model folder (compressed or dense), a GGUF file or a hub id")
    parser.add_argument("--baseline", metavar="MODEL", help="a second model to compare with, usually the dense one")
    parser.add_argument("--text", type=Path, action=Once, metavar="FILE", help="text for the perplexity")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens per window; default min(2048, model's maximum)"
    )
    parser.add_argument("--stride", type=int, metavar="N", help="tokens from window to window; default: the context")
    add_files(parser, "--tasks", "multiple-choice files")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the first N windows, and the first N rows per task"
    )
    add_dtype(parser)
    add_weight_dtype(parser)
    parser.add_argument("--backend", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument("--json", action="store_true", help="print the JSON document only, no table")


def run(args: argparse.Namespace) -> None:
    """Evaluate and print."""
    from neuronmm.measure.config import EvaluationConfig
    from neuronmm.measure.evaluate import run_evaluation
    from neuronmm.measure.report import print_evaluation
    from neuronmm.progress import stage_progress

    config = EvaluationConfig(
        model=args.model,
        baseline=args.baseline,
        text=args.text,
        context=args.context,
        stride=args.stride,
        tasks=args.tasks,
        limit=args.limit,
        dtype=args.dtype,
        backend=args.backend,
        weight_dtype=args.weight_dtype,
    )
    with stage_progress() as progress:
        result = run_evaluation(config, progress)
    if not args.json:
        print_evaluation(result)
    print(json.dumps(result.to_json()))
