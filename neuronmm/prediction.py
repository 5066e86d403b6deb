"""Whole-model predictions for Trainium from a config.json: what ``neuronmm predict`` prints."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from neuronmm.compression.ranks import Linear, auto_align, balance, realised
from neuronmm.emulator.timing.inference import Decoder
from neuronmm.emulator.timing.inference import predict as simulate
from neuronmm.emulator.timing.measured import DECODE_ERROR, MEAN_LATENCY_ERROR
from neuronmm.kernels.hardware import CORES
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS, LINEARS, TARGETS, family_of
from neuronmm.models.source import expanded, read_config
from neuronmm.models.spec import QUANT_METHOD, CompressionSpec

LONGEST_STREAM = 128
"""Largest batch: the decode kernels take up to 128 tokens."""


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
    if device not in CORES:
        raise UserError(f"device {device}: must be one of {', '.join(CORES)}")
    core = CORES[device]
    limits = (("tp", parallel, 64), ("batch", batch, LONGEST_STREAM), ("prompt-length", prompt_length, 1 << 20))
    for name, value, most in limits:
        if not 1 <= value <= most:
            raise UserError(f"--{name} {value}: must lie between 1 and {most}")
    dense, low_rank, targets, removed = _decoders(expanded(model), ratio)
    predictions = {}
    for name, decoder in (("dense", dense), ("compressed", low_rank)):
        found = simulate(decoder, core, batch, prompt_length, parallel)
        predictions[name] = {**asdict(found), "fits": found.fits(core)}
    return {
        "kind": "predicted",
        "model": str(model),
        "device": device,
        "cores": parallel,
        "batch": batch,
        "prompt_length": prompt_length,
        "targets": targets,
        "realised_ratio": removed,
        **predictions,
        "validation": {
            "published_kernel_latencies_mean_absolute_error": MEAN_LATENCY_ERROR,
            "published_dense_decode_error": DECODE_ERROR,
            "measured_on": "trn1, one core",
        },
    }


def _decoders(path: Path, ratio: float | None) -> tuple[Decoder, Decoder, str, float]:
    """The decoder dense and compressed, which linears are targeted, and the realised ratio."""
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
    names = {f"{LAYERS}.{i}.{long}": (i, short) for i in range(dense.layers) for short, long in LINEARS.items()}
    sizes = dense.linears()
    targets = [n for n in names if n.split(".", 3)[3] in TARGETS["mlp"]]

    def linears(which: list[str]) -> list[Linear]:
        return [Linear(n, sizes[names[n][1]][1], sizes[names[n][1]][0]) for n in which]

    if carried.get("quant_method") == QUANT_METHOD and ratio is None:
        spec = CompressionSpec.parse(carried, str(folder))
        followers = tuple(tuple(name for name, _ in layer) for layer in _by_layer(dense, names, spec.shared))
        return (
            dense,
            replace(dense, ranks=_by_layer(dense, names, spec.ranks), followers=followers),
            spec.targets,
            spec.realised_ratio,
        )
    ranks = balance(linears(targets), 0.2 if ratio is None else ratio, auto_align(linears(targets)))
    kept = {name: rank for name, rank in ranks.items() if rank is not None}
    return dense, replace(dense, ranks=_by_layer(dense, names, kept)), "mlp", realised(linears(targets), ranks)


def _by_layer(dense: Decoder, names: dict[str, tuple[int, str]], values: dict[str, Any]) -> tuple[Any, ...]:
    """Full name -> value, as one tuple of (short name, value) a layer."""
    layers: list[list[tuple[str, Any]]] = [[] for _ in range(dense.layers)]
    for name, (layer, short) in names.items():
        if name in values:
            layers[layer].append((short, values[name]))
    return tuple(map(tuple, layers))
