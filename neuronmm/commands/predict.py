"""predict TTFT, TPOT and tokens/s on Trainium from a config.json, dense and compressed

Nothing runs: the figures come from the timing model of the emulator, whose errors against published measurements are
printed with them. A config.json that a compressed checkpoint carries brings its own ranks.

examples:
  neuronmm predict ./Llama-3.2-1B --ratio 0.2 --device trn1
  neuronmm predict ./Qwen3-4B/config.json --device trn2 --tp 4 --batch 8 --prompt-length 2048
  neuronmm predict out/llama-1b-low --device trn3 --json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuronmm.emulator.timing.inference import Decoder

LONGEST_STREAM = 128
"""Largest batch: the decode kernels take up to 128 tokens."""
SHORT = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}


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


def predict(
    model: str | Path,
    *,
    ratio: float | None = None,
    device: str = "trn1",
    parallel: int = 1,
    batch: int = 1,
    prompt_length: int = 128,
) -> dict[str, Any]:
    """Predicted TTFT, TPOT (seconds) and tokens/s of a model on Trainium, dense and compressed.

    Args:
        model: a folder with a config.json, or that file.
        ratio: share of the MLP weights to remove; None: the ranks the config carries, else 0.2.

    Raises:
        UserError: the model cannot be read or is not supported, or an option is out of range.
    """
    from dataclasses import asdict, replace

    from neuronmm.emulator.timing.inference import predict as simulate
    from neuronmm.emulator.timing.measured import DECODE_ERROR, MEAN_LATENCY_ERROR
    from neuronmm.kernels.hardware import CORES
    from neuronmm.models.errors import UserError

    core = CORES[device]
    limits = (("tp", parallel, 64), ("batch", batch, LONGEST_STREAM), ("prompt-length", prompt_length, 1 << 20))
    for name, value, most in limits:
        if not 1 <= value <= most:
            raise UserError(f"--{name} {value}: must lie between 1 and {most}")
    dense, compressed, realised = _decoders(Path(model).expanduser(), ratio)
    predictions = {}
    for name, decoder in (("dense", dense), ("compressed", replace(dense, ranks=compressed))):
        found = simulate(decoder, core, batch, prompt_length, parallel)
        predictions[name] = {**asdict(found), "fits": found.fits(core)}
    return {
        "kind": "predicted",
        "model": str(model),
        "device": device,
        "cores": parallel,
        "batch": batch,
        "prompt_length": prompt_length,
        "mlp_ratio": realised,
        **predictions,
        "validation": {
            "published_kernel_latencies_mean_absolute_error": MEAN_LATENCY_ERROR,
            "published_dense_decode_error": DECODE_ERROR,
            "measured_on": "trn1, one core",
        },
    }


def _decoders(path: Path, ratio: float | None) -> tuple[Decoder, tuple[tuple[tuple[str, int], ...], ...], float]:
    """The dense decoder, the ranks of its compressed layers, and the realised ratio."""
    from neuronmm.compression.ranks import Linear, auto_align, balance, realised
    from neuronmm.emulator.timing.inference import Decoder
    from neuronmm.models.errors import UserError
    from neuronmm.models.families import LAYERS, TARGETS, family_of
    from neuronmm.models.source import read_config
    from neuronmm.models.spec import QUANT_METHOD, CompressionSpec

    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise UserError(f"{path}: no config.json there; give the folder of a Hugging Face checkpoint or the file")
    config = read_config(folder)
    family_of(config, str(folder))
    try:
        heads = int(config["num_attention_heads"])
        dense = Decoder(
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            vocabulary=int(config["vocab_size"]),
        )
    except KeyError as error:
        raise UserError(f"{folder / 'config.json'}: {error} is missing") from None
    carried = config.get("quantization_config") or {}
    names = {f"{LAYERS}.{i}.{long}": (i, short) for i in range(dense.layers) for long, short in SHORT.items()}
    sizes = dense.linears()
    targets = [n for n in names if n.split(".", 3)[3] in TARGETS["mlp"]]

    def linears(which: list[str]) -> list[Linear]:
        return [Linear(n, sizes[names[n][1]][1], sizes[names[n][1]][0]) for n in which]

    if carried.get("quant_method") == QUANT_METHOD and ratio is None:
        ranks: dict[str, int | None] = dict(CompressionSpec.parse(carried, str(folder)).ranks)
        targets = [n for n in names if n in ranks]
    else:
        ranks = balance(linears(targets), 0.2 if ratio is None else ratio, auto_align(linears(targets)))
    layers: list[list[tuple[str, int]]] = [[] for _ in range(dense.layers)]
    for name in targets:
        rank = ranks[name]
        if rank is not None:
            layers[names[name][0]].append((names[name][1], rank))
    return dense, tuple(tuple(layer) for layer in layers), realised(linears(targets), ranks)


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    cores = f"{result['cores']} {result['device']} core" + "s" * (result["cores"] > 1)
    title = f"predicted, not measured: {result['model']} on {cores}, batch {result['batch']}, "
    table = Table(title=title + f"{result['prompt_length']} prompt tokens", title_justify="left")
    for column in ("", "dense", f"compressed ({result['mlp_ratio']:.1%} removed)", "gain"):
        table.add_column(column, justify="left" if not column else "right")
    dense, low = result["dense"], result["compressed"]
    rows = (("TTFT ms", "ttft", 1e3), ("TPOT ms", "tpot", 1e3), ("weights GB a core", "weight_bytes", 1e-9))
    for label, key, scale in rows:
        values = [f"{d[key] * scale:.2f}" for d in (dense, low)]
        table.add_row(label, *values, f"{dense[key] / low[key]:.2f}x")
    speeds = [f"{d['tokens_per_second']:.1f}" for d in (dense, low)]
    table.add_row("tokens/s", *speeds, f"{low['tokens_per_second'] / dense['tokens_per_second']:.2f}x")
    console = Console()
    console.print(table)
    errors = result["validation"]
    console.print(
        f"Timing model against published measurements ({errors['measured_on']}): kernel latencies "
        f"{errors['published_kernel_latencies_mean_absolute_error']:.1%} mean absolute error, dense decode "
        f"{errors['published_dense_decode_error']:+.1%}. Nothing is published for trn2, trn3 or several cores.",
        highlight=False,
    )
    for name in ("dense", "compressed"):
        if not result[name]["fits"]:
            console.print(
                f"The {name} model does not fit: weights and cache exceed a core's share of the HBM; raise --tp."
            )
