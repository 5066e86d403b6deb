"""The verb ``compress``: one pass over the decoder layers, each run, factorised, refined, written and forgotten."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from neuronmm.compression import report
from neuronmm.compression.calibration_store import CalibrationStore, tokens_of
from neuronmm.compression.checkpoint import assemble
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.last_steps import check_device, check_room, last_steps
from neuronmm.compression.layer import Streams, compress_layer
from neuronmm.compression.memory import forget_peak, peak_rss
from neuronmm.compression.plan import Plan, make_plan, measure, needs_spectra, targeted
from neuronmm.compression.ranks import realised
from neuronmm.compression.reader import Reader
from neuronmm.compression.streaming import StreamedModel
from neuronmm.compression.workspace import Workspace
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS
from neuronmm.models.load import inspect
from neuronmm.models.progress import Progress, no_progress
from neuronmm.models.source import read_config, resolve
from neuronmm.models.spec import CompressionSpec
from neuronmm.version import VERSION


def compress(
    model: str | Path,
    out: str | Path,
    config: CompressionConfig | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    device: str = "cpu",
    store: Path | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Write a low-rank version of ``model`` to the folder ``out`` and return the report.

    Args:
        model: a Hugging Face folder, a GGUF file or a hub id.
        out: the new checkpoint's folder; it appears only when it is complete.
        config: the settings; by default 20 % of the MLP, whitened, refined, self-calibrated.
        resume: continue an interrupted run of the same settings.
        force: replace ``out`` if it exists.
        device: where the layers run and are factorised and trained, as torch names it: ``cpu`` or ``cuda``.
        store: a folder for the calibration's tokens and moments, made or found there; for many runs on one text.
        progress: told of every step.

    Raises:
        UserError: anything about the request or the checkpoint that the caller can mend.
    """
    began = time.perf_counter()
    forget_peak()
    check_device(device)
    config = config or CompressionConfig()
    inputs = (model, config.text_file, store)
    with Workspace(out, inputs, resume=resume, force=force) as workspace:
        return _compress(model, workspace, config, device, store, progress, began)


def _compress(
    model: str | Path,
    workspace: Workspace,
    config: CompressionConfig,
    device: str,
    store: Path | None,
    progress: Progress,
    began: float,
) -> dict[str, Any]:
    """As :func:`compress`, in a workspace of its own."""
    folder = resolve(model)
    workspace.protect(folder)
    if "quantization_config" in read_config(folder):
        raise UserError(f"{folder}: is already compressed or quantised; compress the original checkpoint")
    contents = inspect(folder)
    settings, reader = contents.settings, Reader(folder, contents.files)
    linears = targeted(reader, contents.config.num_hidden_layers, config.targets)
    plan = make_plan(linears, config)
    total = sum(map(reader.parameters, reader.names))
    factors = sum(linear.kept(plan.ranks[linear.name]) for linear in plan.linears)
    size = reader.total_bytes()
    check_room(workspace.out, 2 * size, size, total, factors, config)  # parts and final shards lie there together
    run = {"model": str(folder), "bytes": size, "version": VERSION, "device": device}
    run |= config.model_dump()
    workspace.begin(run)
    reader.check_finite()

    rows: Tensor | None = None
    common = None
    if store is not None and config.needs_text:
        common = CalibrationStore(store, folder, size, device, config)
    if config.needs_text:
        rows = tokens_of(workspace, folder, config, device, common, progress)
    streamed = StreamedModel(folder, torch.float32, device)
    if rows is not None and needs_spectra(config):
        plan = make_plan(linears, config, measure(streamed, linears, rows, config, workspace, common, progress))
    found = _layers(streamed, plan, rows, config, workspace, common, progress)

    layers = workspace.layer_facts(contents.config.num_hidden_layers)
    spec = _spec(config, plan, rows, total)
    done = {"kind": "measured", "model": str(model), **_facts(config, spec, plan, total, layers)}

    others = [name for name in reader.names if not name.startswith(f"{LAYERS}.")]
    compressed = {**settings, "quantization_config": spec.model_dump()}

    def fill(final: Path) -> None:
        assemble(final, reader, others, [workspace.part(index) for index in range(len(layers))], compressed)
        work = workspace.folder
        recovery = last_steps(final, rows, config, progress, dense=folder, device=device, work=work)
        # A resumed run counts the layers and passes that it found done; those of this run lie within its own time.
        before = sum(layer["seconds"] for layer in layers[:found])
        before += recovery["resumed_seconds"] if recovery else 0.0
        done["recovery"] = recovery
        done["bytes"] = {"dense": size, "compressed": Reader(final).total_bytes()}
        done["seconds"] = before + time.perf_counter() - began + (common.seconds if common is not None else 0.0)
        done["peak_rss_bytes"] = max(peak_rss(), *(layer["peak_rss_bytes"] for layer in layers))
        report.write(done, final)

    workspace.finish(fill)
    return done


def _spec(config: CompressionConfig, plan: Plan, rows: Tensor | None, total: int) -> CompressionSpec:
    """What the checkpoint says of itself; ``total`` is the dense model's parameters."""
    text = None
    if rows is not None:
        text = {"source": config.calibration, "rows": len(rows), "length": rows.shape[1], "seed": config.seed}
    return CompressionSpec(
        ranks=plan.part_ranks,
        shared=plan.shared,
        method=config.method,
        targets=config.targets,
        asked_ratio=config.ratio,
        realised_ratio=realised(plan.linears, plan.ranks),
        model_ratio=plan.removed / total,
        align=plan.align,
        calibration=text,
        version=VERSION,
    )


def _facts(
    config: CompressionConfig, spec: CompressionSpec, plan: Plan, total: int, layers: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the report says beside times, sizes and recovery."""
    matrices = [matrix for layer in layers for matrix in layer["matrices"]]
    errors = [matrix["relative_error"] for matrix in matrices if matrix["rank"] is not None]
    settings = ("allocation", "share", "refine", "recover", "factors", "damping")
    return {
        **spec.model_dump(exclude={"ranks", "shared", "factors", "quant_method"}),
        **config.model_dump(include=set(settings)),
        "parameters": {"dense": total, "compressed": total - plan.removed},
        "mean_relative_error": sum(errors) / len(errors),
        "block_loss": _block_loss(layers),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "matrices": matrices,
        "recovery": None,
    }


@torch.no_grad()
def _layers(
    model: StreamedModel,
    plan: Plan,
    rows: Tensor | None,
    config: CompressionConfig,
    workspace: Workspace,
    store: CalibrationStore | None,
    progress: Progress,
) -> int:
    """Compress layer by layer, from the first one that is not done yet; how many were done before."""
    measured = store is not None and store.complete(len(model))
    followed = () if rows is None or (measured and config.streams == ("dense",)) else config.streams
    first = workspace.layers_done(len(model), followed)
    progress("compressing", first / len(model))
    streams: Streams = {}
    rotary = None
    if rows is not None and followed and first < len(model):
        kept = workspace.load(f"hidden-{first:05d}", followed) if first else None
        streams = kept or {name: model.embed(rows) for name in followed}
        streams = {name: hidden.to(model.device) for name, hidden in streams.items()}
        rotary = model.rotary(streams["dense"], torch.arange(rows.shape[1])[None])
    refined = 0.9 if config.refine != "off" else 0.0  # share of a layer's time
    for index in range(first, len(model)):
        began = time.perf_counter()
        with model.layer(index) as layer:
            tensors, facts = compress_layer(
                layer,
                index,
                model.reader,
                plan,
                streams,
                rotary,
                config,
                store,
                model.release,
                lambda share: progress("compressing", refined * share / len(model)),
            )
        if streams and index + 1 < len(model):
            workspace.save(f"hidden-{index + 1:05d}", streams)
        facts |= {"seconds": time.perf_counter() - began, "peak_rss_bytes": peak_rss()}
        workspace.save_layer(index, tensors, facts)
        workspace.drop(f"hidden-{index:05d}")
        model.reader.close()  # pages of the mapped shard count as resident as long as it is mapped
        progress("compressing", (1 - refined) / len(model))
    return first


def _block_loss(layers: list[dict[str, Any]]) -> dict[str, float] | None:
    """The refinement's held-out losses, averaged over the layers."""
    losses = [layer["refinement"] for layer in layers if "refinement" in layer]
    if not losses:
        return None
    return {when: sum(loss[f"loss_{when}"] for loss in losses) / len(losses) for when in ("before", "after")}
