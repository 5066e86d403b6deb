"""Whole-model predictions for Trainium from a config.json: what ``neuronmm predict`` prints."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from neuronmm.compression.ranks import Linear, auto_align, balance, realised
from neuronmm.emulator.timing.inference import Decoder
from neuronmm.emulator.timing.inference import predict as simulate
from neuronmm.emulator.timing.measured import VALIDATION
from neuronmm.kernels.hardware import CORES
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS, LINEARS, TARGETS
from neuronmm.models.model_config import ModelConfig
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

    ``validation`` in the result says how far the model is from published measurements. TTFT is not validated.

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
        "validation": VALIDATION,
    }


def _decoders(path: Path, ratio: float | None) -> tuple[Decoder, Decoder, str, float]:
    """The decoder dense and compressed, which linears are targeted, and the realised ratio."""
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise UserError(f"{path}: no config.json there; give the folder of a Hugging Face checkpoint or the file")
    config = read_config(folder)
    found = ModelConfig.parse(config, str(folder / "config.json"))
    dense = Decoder(
        hidden=found.hidden_size,
        intermediate=found.intermediate_size,
        layers=found.num_hidden_layers,
        heads=found.num_attention_heads,
        kv_heads=found.kv_heads,
        head=found.head,
        vocabulary=found.vocab_size,
    )
    carried = config.get("quantization_config")
    names = {f"{LAYERS}.{i}.{long}": (i, short) for i in range(dense.layers) for short, long in LINEARS.items()}
    sizes = dense.linears()
    targets = [n for n in names if n.split(".", 3)[3] in TARGETS["mlp"]]

    def linears(which: list[str]) -> list[Linear]:
        return [Linear(n, sizes[names[n][1]][1], sizes[names[n][1]][0]) for n in which]

    if isinstance(carried, dict) and carried.get("quant_method") == QUANT_METHOD and ratio is None:
        spec = CompressionSpec.parse(carried, str(folder / "config.json"))
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
