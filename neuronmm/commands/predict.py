"""predict TTFT, TPOT and tokens/s on Trainium from a config.json, dense and compressed

Nothing runs: the figures come from the timing model of the emulator, whose errors against published measurements are
printed with them. TTFT is not validated: the one published context encoding took five times as long as predicted.
A config.json that a compressed checkpoint carries brings its own ranks.

examples:
  neuronmm predict ./Llama-3.2-1B --ratio 0.2 --device trn1
  neuronmm predict ./Qwen3-4B/config.json --device trn2 --tp 4 --batch 8 --prompt-length 2048
  neuronmm predict out/llama-1b-low --device trn3 --json
"""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("model", metavar="MODEL", help="a model folder or a config.json; weights are not read")
    parser.add_argument("--ratio", type=float, help="share of the MLP weights to remove, 0.05 to 0.6 (default 0.2)")
    parser.add_argument("--device", default="trn1", choices=("trn1", "trn2", "trn3"), help="default trn1")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="cores that share the model; default 1")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at once; default 1")
    parser.add_argument("--prompt-length", type=int, default=128, metavar="N", help="tokens a prompt; default 128")
    parser.add_argument("--json", action="store_true", help="print the JSON document only, no table")


def run(args: argparse.Namespace) -> None:
    """Predict and print."""
    from neuronmm.measure.prediction import predict

    result = predict(
        args.model,
        ratio=args.ratio,
        device=args.device,
        parallel=args.tp,
        batch=args.batch,
        prompt_length=args.prompt_length,
    )
    if not args.json:
        _print(result)
    print(json.dumps(result))


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from neuronmm.emulator.timing.measured import CAVEAT

    cores = f"{result['cores']} {result['device']} core" + "s" * (result["cores"] > 1)
    title = f"predicted, not measured: {result['model']} on {cores}, batch {result['batch']}, "
    table = Table(title=title + f"{result['prompt_length']} prompt tokens", title_justify="left")
    for column in ("", "dense", f"compressed ({result['realised_ratio']:.1%} of {result['targets']} removed)", "gain"):
        table.add_column(column, justify="left" if not column else "right")
    dense, low = result["dense"], result["compressed"]
    rows = (
        ("TTFT ms (not validated)", "ttft", 1e3),
        ("TPOT ms", "tpot", 1e3),
        ("weights GB a core", "weight_bytes", 1e-9),
    )
    for label, key, scale in rows:
        values = [f"{d[key] * scale:.2f}" for d in (dense, low)]
        table.add_row(label, *values, f"{dense[key] / low[key]:.2f}x")
    speeds = [f"{d['tokens_per_second']:.1f}" for d in (dense, low)]
    table.add_row("tokens/s", *speeds, f"{low['tokens_per_second'] / dense['tokens_per_second']:.2f}x")
    console = Console()
    console.print(table)
    console.print(f"{CAVEAT} Nothing is published for trn2, trn3 or several cores.", highlight=False)
    for name in ("dense", "compressed"):
        if not result[name]["fits"]:
            console.print(
                f"The {name} model does not fit: weights and cache exceed a core's share of the HBM; raise --tp."
            )
