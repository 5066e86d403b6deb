"""The verb ``compress``: one pass over the decoder layers, each run, factorised, written and forgotten."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from neuronmm.compression import calibration, report
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.factorize import factorize
from neuronmm.compression.moments import Moments, gathering
from neuronmm.compression.ranks import Linear, auto_align, balance, realised
from neuronmm.compression.reader import Reader
from neuronmm.compression.streaming import StreamedModel, run_layer
from neuronmm.compression.workspace import Workspace
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS, TARGETS, family_of
from neuronmm.models.load import load_tokenizer
from neuronmm.models.source import read_config, resolve
from neuronmm.models.spec import CompressionSpec

Progress = Callable[[str, float], None]
"""Called with a stage's name and the further share of it that is done; the shares of a stage add up to 1."""

_BATCH_TOKENS = 2048  # calibration tokens that pass through a layer together


def compress(
    model: str | Path,
    out: str | Path,
    config: CompressionConfig | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    progress: Progress = lambda stage, share: None,
) -> dict[str, Any]:
    """Write a low-rank version of ``model`` to the folder ``out`` and return the report.

    Args:
        model: a Hugging Face folder, a GGUF file or a hub id.
        out: the new checkpoint's folder; it appears only when it is complete.
        config: the settings; by default 20 % of the MLP, whitened, self-calibrated.
        resume: continue an interrupted run of the same settings.
        force: replace ``out`` if it exists.
        progress: told of every step.

    Raises:
        UserError: anything about the request or the checkpoint that the caller can mend.
    """
    began = time.perf_counter()
    config = config or CompressionConfig()
    out = Path(out).expanduser().absolute()
    folder = resolve(model)
    settings = read_config(folder)
    family_of(settings, str(folder / "config.json"))
    if "quantization_config" in settings:
        raise UserError(f"{folder}: is already compressed or quantised; compress the original checkpoint")
    reader = Reader(folder)
    linears = targeted(reader, settings["num_hidden_layers"], config.targets)
    align = auto_align(linears) if config.align == "auto" else config.align
    ranks = balance(linears, config.ratio, align)
    _check_disk(out, reader.total_bytes())
    run = {"model": str(folder), "bytes": reader.total_bytes(), "version": version("neuronmm"), **config.model_dump()}
    workspace = Workspace(out, run, resume, force)

    rows = None if config.method == "svd" else _rows(folder, config, workspace, progress)
    found = workspace.layers_done()
    _layers(folder, linears, ranks, rows, config, workspace, progress)

    layers = workspace.layer_facts(settings["num_hidden_layers"])
    matrices = [matrix for layer in layers for matrix in layer["matrices"]]
    total = sum(_size(reader, name) for name in reader.names)
    removed = sum(linear.dense - linear.kept(ranks[linear.name]) for linear in linears)
    errors = [matrix["relative_error"] for matrix in matrices if matrix["rank"] is not None]
    spec = CompressionSpec(
        ranks={name: rank for name, rank in ranks.items() if rank is not None},
        method=config.method,
        targets=config.targets,
        asked_ratio=config.ratio,
        realised_ratio=realised(linears, ranks),
        model_ratio=removed / total,
        align=align,
        calibration=None
        if rows is None
        else {"source": config.calibration, "rows": len(rows), "length": rows.shape[1], "seed": config.seed},
        version=version("neuronmm"),
    )
    done = {
        "kind": "measured",
        "model": str(model),
        **spec.model_dump(exclude={"ranks", "quant_method"}),
        "damping": config.damping,
        "parameters": {"dense": total, "compressed": total - removed},
        "mean_relative_error": sum(errors) / len(errors),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "matrices": matrices,
    }

    def texts() -> dict[str, str]:
        # A resumed run counts the layers that it found done; those of this run lie within its own time.
        before = sum(layer["seconds"] for layer in layers[:found])
        done["seconds"] = before + time.perf_counter() - began
        done["peak_rss_bytes"] = max(peak_rss(), *(layer["peak_rss_bytes"] for layer in layers))
        return {"compression_report.json": report.as_json(done), "compression_report.md": report.as_markdown(done)}

    others = [name for name in reader.names if not name.startswith(f"{LAYERS}.")]
    compressed = {**settings, "quantization_config": spec.model_dump()}
    workspace.finish(reader, others, settings["num_hidden_layers"], compressed, texts)
    return done


def targeted(reader: Reader, layers: int, targets: str) -> list[Linear]:
    """The linears that ``targets`` names, in the order of the layers."""
    return [
        Linear(name, *reader.shape(f"{name}.weight"))
        for index in range(layers)
        for name in (f"{LAYERS}.{index}.{linear}" for linear in TARGETS[targets])
    ]


def peak_rss() -> int:
    """The largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _size(reader: Reader, name: str) -> int:
    return int(torch.Size(reader.shape(name)).numel())


def _check_disk(out: Path, needed: int) -> None:
    """Parts and final shards lie on the disk together for a moment: twice the (at most dense) size."""
    parent = next(folder for folder in out.parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < 2 * needed:
        raise UserError(
            f"{parent}: {free / 1e9:.1f} GB free, about {2 * needed / 1e9:.1f} GB needed; free some or move -o"
        )


def _rows(folder: Path, config: CompressionConfig, workspace: Workspace, progress: Progress) -> Tensor:
    """The calibration tokens [rows, length], made once and kept for a resumed run."""
    kept = workspace.load("calibration")
    if kept is not None:
        return kept["tokens"]
    tokenizer = load_tokenizer(folder)
    rows = calibration.Rows(config.calibration_rows, config.calibration_length, config.seed)
    if config.calibration == calibration.SELF:
        dtype = Reader(folder)[f"{LAYERS}.0.mlp.down_proj.weight"].dtype
        model = StreamedModel(folder, dtype)
        tokens = calibration.from_model(model, tokenizer, rows, lambda share: progress("sampling text", share))
    else:
        tokens = calibration.from_file(Path(config.calibration), tokenizer, rows)
    workspace.save("calibration", {"tokens": tokens})
    return tokens


@torch.inference_mode()
def _layers(
    folder: Path,
    linears: list[Linear],
    ranks: dict[str, int | None],
    rows: Tensor | None,
    config: CompressionConfig,
    workspace: Workspace,
    progress: Progress,
) -> None:
    """Compress layer by layer, from the first one that is not done yet."""
    model = StreamedModel(folder, torch.float32)
    first = workspace.layers_done()
    progress("compressing", first / len(model))
    hidden = None
    if rows is not None and first < len(model):
        kept = workspace.load(f"hidden-{first:05d}")
        hidden = model.embed(rows) if kept is None else kept["hidden"]
    for index in range(first, len(model)):
        began = time.perf_counter()
        inside = f"{LAYERS}.{index}."
        here = {linear.name.removeprefix(inside): linear for linear in linears if linear.name.startswith(inside)}
        moments = {} if hidden is None else _advance(model, index, hidden, list(here), config.damping)
        if hidden is not None and index + 1 < len(model):
            workspace.save(f"hidden-{index + 1:05d}", {"hidden": hidden})
        tensors, matrices = _factorise(model.reader, inside, here, ranks, moments, config)
        facts = {"matrices": matrices, "seconds": time.perf_counter() - began, "peak_rss_bytes": peak_rss()}
        workspace.save_layer(index, tensors, facts)
        workspace.drop(f"hidden-{index:05d}")
        model.reader.close()  # pages of the mapped shard count as resident as long as it is mapped
        progress("compressing", 1 / len(model))


def _advance(model: StreamedModel, index: int, hidden: Tensor, names: list[str], damping: float) -> dict[str, Moments]:
    """Run layer ``index`` over ``hidden`` [rows, length, hidden] in place; return its linears' moments."""
    together = max(1, _BATCH_TOKENS // hidden.shape[1])
    rotary = model.rotary(hidden, torch.arange(hidden.shape[1])[None])
    with model.layer(index) as layer, gathering(layer, names, damping) as moments:
        for batch in hidden.split(together):
            batch.copy_(run_layer(layer, batch, rotary))
    return moments


def _factorise(
    reader: Reader,
    inside: str,
    here: dict[str, Linear],
    ranks: dict[str, int | None],
    moments: dict[str, Moments],
    config: CompressionConfig,
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """All tensors of one layer, its targeted linears factorised, and their lines of the report."""
    tensors = {name: reader[name] for name in reader.under(inside) if not name.endswith("rotary_emb.inv_freq")}
    matrices = []
    try:
        for name, linear in here.items():
            rank, error = ranks[linear.name], 0.0
            if rank is not None:
                weight = tensors.pop(f"{linear.name}.weight")
                factors = factorize(weight, rank, moments.get(name))
                tensors[f"{linear.name}.A.weight"] = factors.A.to(weight.dtype)
                tensors[f"{linear.name}.B.weight"] = factors.B.to(weight.dtype)
                if f"{linear.name}.bias" in tensors:
                    tensors[f"{linear.name}.B.bias"] = tensors.pop(f"{linear.name}.bias")
                error = factors.relative_error
            matrix: report.Matrix = {
                "name": linear.name,
                "shape": [linear.out_features, linear.in_features],
                "rank": rank,
                "dense_parameters": linear.dense,
                "kept_parameters": linear.kept(rank),
                "asked_ratio": config.ratio,
                "realised_ratio": 1 - linear.kept(rank) / linear.dense,
                "relative_error": error,
            }
            matrices.append(dict(matrix))
    except ValueError as error:
        raise UserError(
            f"{reader.folder}: {inside}*: {error}; the checkpoint is damaged or unstable in float32"
        ) from None
    return tensors, matrices
