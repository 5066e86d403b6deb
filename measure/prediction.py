"""Predict the speed of a model on Trainium from its sizes: what ``neuronmm predict`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.ranks import Linear, balance, realised
from neuronmm.emulator.timing.inference import Decoder
from neuronmm.emulator.timing.inference import Prediction as Times
from neuronmm.emulator.timing.inference import predict as simulate
from neuronmm.emulator.timing.measured import VALIDATION
from neuronmm.kernels.hardware import CORES
from neuronmm.measure.config import PredictionConfig
from neuronmm.models.errors import UserError
from neuronmm.models.families import LINEARS, TARGETS
from neuronmm.models.model_config import ModelConfig
from neuronmm.models.neuronx.checkpoint import layer_name
from neuronmm.models.neuronx.expansion import low_rank
from neuronmm.models.neuronx.heads import distribute
from neuronmm.models.neuronx.intermediate import MLP, Split, split_mlp
from neuronmm.models.source import config_folder, expanded, is_gguf, read_config
from neuronmm.models.spec import QUANT_METHOD, CompressionSpec


@dataclass(frozen=True)
class ModelPrediction:
    """The predicted times of one model, and whether its weights and cache fit into the HBM."""

    times: Times
    fits: bool

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {**asdict(self.times), "fits": self.fits}


@dataclass(frozen=True)
class PredictionResult:
    """All that ``neuronmm predict`` reports. ``targets``: the factorised linears."""

    config: PredictionConfig
    targets: str
    realised_ratio: float
    dense: ModelPrediction
    compressed: ModelPrediction

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document. ``validation`` holds the errors against published measurements."""
        return {
            "kind": "predicted",
            "what": "prediction",
            "model": str(self.config.model),
            "device": self.config.device,
            "cores": self.config.parallel,
            "batch": self.config.batch,
            "prompt_length": self.config.prompt_length,
            "targets": self.targets,
            "realised_ratio": self.realised_ratio,
            "dense": self.dense.to_json(),
            "compressed": self.compressed.to_json(),
            "validation": VALIDATION,
        }


def predict(
    model: str | Path,
    *,
    ratio: float | None = None,
    targets: str | None = None,
    device: str = "trn1",
    parallel: int = 1,
    batch: int = 1,
    prompt_length: int = 128,
) -> dict[str, Any]:
    """Predict TTFT, TPOT (seconds) and tokens/s on Trainium, dense and compressed, and return the JSON document.

    The arguments are those of :class:`.PredictionConfig`. TTFT is not validated.
    """
    return run_prediction(PredictionConfig(model, ratio, targets, device, parallel, batch, prompt_length)).to_json()


def run_prediction(config: PredictionConfig) -> PredictionResult:
    """Predict TTFT, TPOT (seconds) and tokens/s on Trainium, dense and compressed. TTFT is not validated.

    Raises:
        UserError: the model cannot be read or is not supported, or the ratio is out of range.
    """
    dense, compressed, targets, realised_ratio = _decoders(config)
    return PredictionResult(config, targets, realised_ratio, _simulate(dense, config), _simulate(compressed, config))


def _simulate(decoder: Decoder, config: PredictionConfig) -> ModelPrediction:
    core = CORES[config.device]
    times = simulate(decoder, core, config.batch, config.prompt_length, config.parallel)
    return ModelPrediction(times, times.fits(core))


def _decoders(config: PredictionConfig) -> tuple[Decoder, Decoder, str, float]:
    """Return the dense and the compressed decoder, the targets, and the realised ratio."""
    where, dimensions, block = _read(config.model)
    cores, heads, intermediate = config.parallel, dimensions.num_attention_heads, dimensions.intermediate_size
    if cores > heads or intermediate % cores:
        raise UserError(
            f"--tp {cores}: has to divide the intermediate size, {intermediate}, and cannot exceed the {heads} heads"
        )
    spread = distribute(heads, dimensions.kv_heads, cores)  # with the heads of zeros that every core has
    dense = Decoder(
        hidden=dimensions.hidden_size,
        intermediate=intermediate,
        layers=dimensions.num_hidden_layers,
        heads=cores * spread.queries_per_core,
        kv_heads=cores * spread.keys_per_core,
        head=dimensions.head,
        vocabulary=dimensions.vocab_size,
    )
    shapes = dimensions.linears
    if isinstance(block, dict) and block.get("quant_method") == QUANT_METHOD and not config.asks:
        spec = CompressionSpec.parse(block, where)
        if spec.few_bits is not None:
            raise UserError(f"{where}: {spec.few_bits}, which no Neuron host runs; give --ratio for the dense model's")
        _check_ranks(spec, shapes, dense.layers, where)
        mlps = [_mlp(dense, spec, index, config.parallel) for index in range(dense.layers)]
        layers = [
            low_rank(index, shapes, spec.ranks, spec.shared, MLP if mlp else ()) for index, mlp in enumerate(mlps)
        ]
        compressed = replace(
            dense,
            ranks=tuple(tuple((name, plan.rank) for name, plan in layer.items()) for layer in layers),
            followers=tuple(tuple(name for name, plan in layer.items() if plan.leader) for layer in layers),
            pivots=tuple(map(_pivots, mlps)),
        )
        return dense, compressed, spec.targets, spec.realised_ratio
    default = CompressionConfig()
    targets, ratio = config.targets or default.targets, default.ratio if config.ratio is None else config.ratio
    targeted = [name for name, module in LINEARS.items() if module in TARGETS[targets]]
    names = [{name: layer_name(index, LINEARS[name]) for name in targeted} for index in range(dense.layers)]
    linears = [Linear(full, *shapes[name]) for layer in names for name, full in layer.items()]
    ranks = balance(linears, ratio, "auto")
    by_layer = tuple(
        tuple((name, rank) for name, full in layer.items() if (rank := ranks[full]) is not None) for layer in names
    )
    return dense, replace(dense, ranks=by_layer), targets, realised(linears, ranks)


def _read(model: str | Path) -> tuple[str, ModelConfig, object]:
    """Return the file that describes ``model``, its sizes, and its ``quantization_config``, if any."""
    path = expanded(model)
    if path.name != "config.json" and is_gguf(path):
        from neuronmm.models.gguf_header import read_header
        from neuronmm.models.gguf_names import sizes_of

        return str(path), sizes_of(path, read_header(path)), None
    folder = config_folder(model)
    where, document = str(folder / "config.json"), read_config(folder)
    return where, ModelConfig.parse(document, where), document.get("quantization_config")


def _check_ranks(spec: CompressionSpec, shapes: Mapping[str, tuple[int, int]], layers: int, where: str) -> None:
    """Check that no rank exceeds the inputs of its linear; no weights are read here that would show it.

    Raises:
        UserError: one does.
    """
    for index in range(layers):
        for name, (_, inputs) in shapes.items():
            full = layer_name(index, LINEARS[name])
            if spec.ranks.get(full, 1) > inputs:
                raise UserError(
                    f"{where}: quantization_config: {full} has {inputs} inputs, so its rank cannot be "
                    f"{spec.ranks[full]}; config.json is wrong"
                )


def _mlp(dense: Decoder, spec: CompressionSpec, layer: int, parallel: int) -> Split | None:
    """Return how the MLP of a layer is split over the cores if one kernel computes it."""
    linears = [layer_name(layer, LINEARS[name]) for name in MLP]
    return split_mlp(linears, spec.ranks, spec.shared, spec.forms, dense.intermediate, parallel)


def _pivots(mlp: Split | None) -> tuple[tuple[str, int], ...]:
    """Return (short name, pivots on each core) of the linears of an MLP whose pivots its kernel uses."""
    if mlp is None:
        return ()
    return tuple((name, pivots.number) for name, pivots in zip(MLP, mlp.per_core.pivots, strict=True) if pivots)
