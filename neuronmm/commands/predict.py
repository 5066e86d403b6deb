"""predict TTFT, TPOT and tokens/s on Trainium from a model's sizes, dense and compressed

Nothing runs: the figures come from the emulator's timing model. Its errors against published measurements are printed
with them. TTFT is not validated: the one published context encoding took five times as long as predicted. The
config.json of a compressed checkpoint supplies its own ranks. A dense model, or --ratio or --targets, gets two factors
of uniform rank. Pivots that the MLP kernel uses count as such; other pivoted linears count as two factors, or as the
matrix where that has fewer weights, as the hosts run them.

examples:
  neuronmm predict ./Llama-3.2-1B --ratio 0.2 --targets mlp --device trn1
  neuronmm predict ./Qwen3-4B/config.json --device trn2 --tp 4 --batch 8 --prompt-length 2048
  neuronmm predict out/llama-1b-low --device trn3 --json
  neuronmm predict SmolLM2.gguf
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from neuronmm.checkpoint_run import add_targets

if TYPE_CHECKING:
    from neuronmm.measure.prediction import PredictionResult

_LINEARS = {"mlp": "the MLP", "attention": "the attention", "all": "all linears"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", help="a folder, config.json, GGUF file or hub id; no weight is read")
    parser.add_argument("--ratio", type=float, help="fraction of the targets to remove, 0.05 to 0.6 (default 0.15)")
    add_targets(parser)
    parser.add_argument("--device", default="trn1", choices=("trn1", "trn2", "trn3"), help="default trn1")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="cores that share the model; default 1")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at once; default 1")
    parser.add_argument("--prompt-length", type=int, default=128, metavar="N", help="tokens per prompt; default 128")
    parser.add_argument("--json", action="store_true", help="print the JSON document only, no table")


def run(args: argparse.Namespace) -> None:
    """Predict and print."""
    from neuronmm.measure.config import PredictionConfig
    from neuronmm.measure.prediction import run_prediction

    config = PredictionConfig(
        model=args.model,
        ratio=args.ratio,
        targets=args.targets,
        device=args.device,
        parallel=args.tp,
        batch=args.batch,
        prompt_length=args.prompt_length,
    )
    result = run_prediction(config)
    if not args.json:
        _print(result)
    print(json.dumps(result.to_json()))


def _print(result: PredictionResult) -> None:
    from rich.console import Console
    from rich.table import Table

    from neuronmm.emulator.timing.measured import CAVEAT
    from neuronmm.models.errors import printable

    config = result.config
    cores = f"{config.parallel} {config.device} core" + "s" * (config.parallel > 1)
    title = f"predicted, not measured: {config.model} on {cores}, batch {config.batch}, "
    table = Table(title=title + f"{config.prompt_length} prompt tokens", title_justify="left")
    targets = _LINEARS.get(result.targets, printable(result.targets))
    removed = f"{result.realised_ratio:.1%} of {targets} removed"
    for column in ("", "dense", f"compressed ({removed})", "gain"):
        table.add_column(column, justify="left" if not column else "right")
    dense, compressed = result.dense.times, result.compressed.times
    rows = (
        ("TTFT ms (not validated)", dense.ttft, compressed.ttft, 1e3),
        ("TPOT ms", dense.tpot, compressed.tpot, 1e3),
        ("weights GB per core", dense.weight_bytes, compressed.weight_bytes, 1e-9),
    )
    for label, before, after, scale in rows:
        table.add_row(label, f"{before * scale:.2f}", f"{after * scale:.2f}", f"{before / after:.2f}x")
    speeds = (dense.tokens_per_second, compressed.tokens_per_second)
    table.add_row("tokens/s", *(f"{speed:.1f}" for speed in speeds), f"{speeds[1] / speeds[0]:.2f}x")
    console = Console(markup=False)
    console.print(table)
    console.print(f"{CAVEAT} Nothing is published for trn2, trn3 or several cores.", highlight=False)
    for name, model in (("dense", result.dense), ("compressed", result.compressed)):
        if not model.fits:
            console.print(
                f"The {name} model does not fit: weights and cache exceed a core's share of the HBM; raise --tp."
            )
