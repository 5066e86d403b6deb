"""measure dense, naive two-GEMM and fused decoding side by side in one process

examples:
  neuronmm benchmark OUT --baseline MODEL
  neuronmm benchmark OUT --baseline MODEL --prompt-lengths 32,512 --batch 1,4 --runs 5 --output results
  neuronmm benchmark MODEL --threads 2 --dtype bf16        (a dense model alone)
  neuronmm benchmark MODEL --weight-dtype int4             (bf16 and int4 side by side)
  neuronmm benchmark MODEL --draft ngram --new-tokens 128  (drafts beside plain decoding)
  neuronmm benchmark OUT --baseline MODEL --backend neuron --tp 2             (on Trainium)
  neuronmm benchmark OUT --baseline MODEL --backend neuron --tp 2 --emulate   (predicted times, and the emulation's)

Prompts are random tokens, the same for every variant, and end-of-sequence tokens are ignored. TTFT is the time to the
first token (prefill), TPOT the time per later token; tokens/s never counts prompt tokens. The table goes to stdout, and
the last line of stdout is one JSON document. --output also writes benchmark.json and benchmark.png to a folder.
--draft measures one model with and without drafts instead, on three prompts of words, because it depends on the text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from neuronmm.arguments import listed
from neuronmm.commands.generate import add_dtype, add_neuron_arguments, add_weight_dtype, backend_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="OUT", help="a compressed model folder, or a dense model alone")
    parser.add_argument("--baseline", metavar="MODEL", help="the dense model to compare with; default: none")
    lengths, rows = listed(int, "32,512"), listed(int, "1,4")
    parser.add_argument("--prompt-lengths", type=lengths, default=(32, 512), metavar="N,N", help="default 32,512")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="tokens per run; default 32")
    parser.add_argument("--batch", type=rows, default=(1,), metavar="N,N", help="batch sizes; default 1")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="measured rounds; default 5")
    add_dtype(parser)
    add_weight_dtype(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="torch threads; default: torch's own choice")
    parser.add_argument("--draft", metavar="ngram|int4|int8|CHECKPOINT", help="compare plain decoding with drafts")
    parser.add_argument("--backend", default="auto", help="auto (default), cpu, cuda or neuron")
    add_neuron_arguments(parser)
    parser.add_argument("--output", type=Path, metavar="DIR", help="also write benchmark.json and benchmark.png to DIR")
    parser.add_argument("--json", action="store_true", help="print the JSON document only, no table")


def run(args: argparse.Namespace) -> None:
    """Measure, write and print."""
    from neuronmm.measure.benchmark import run_benchmark
    from neuronmm.measure.config import BenchmarkConfig
    from neuronmm.measure.report import print_benchmark, results_folder, write_benchmark
    from neuronmm.progress import stage_progress

    inputs = (args.model, args.baseline)
    output = results_folder(args.output, inputs) if args.output else None  # reported before minutes of measuring
    config = BenchmarkConfig(
        model=args.model,
        baseline=args.baseline,
        prompt_lengths=args.prompt_lengths,
        new_tokens=args.new_tokens,
        batches=args.batch,
        runs=args.runs,
        dtype=args.dtype,
        threads=args.threads,
        backend=args.backend,
        options=backend_options(args),
        draft=args.draft,
    )
    with stage_progress(live=False) as progress:
        result = run_benchmark(config, progress)
    if output:
        write_benchmark(result, output)
    if not args.json:
        print_benchmark(result)
    print(json.dumps(result.to_json()))
