"""The verb ``compress``: one pass over the decoder layers, each run, factorised, refined, written and forgotten."""

from __future__ import annotations

import shutil
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor

from neuronmm.compression import calibration, report
from neuronmm.compression.calibration_store import CalibrationStore
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.distillation import rows_a_pass
from neuronmm.compression.eight_bit import store_int8
from neuronmm.compression.layer import Streams, compress_layer
from neuronmm.compression.memory import forget_peak, peak_rss
from neuronmm.compression.plan import Plan, make_plan, measure, needs_spectra, targeted
from neuronmm.compression.progress import Progress
from neuronmm.compression.ranks import realised
from neuronmm.compression.reader import Reader
from neuronmm.compression.recovery import Recovery, recover
from neuronmm.compression.refine import multiplies_bf16
from neuronmm.compression.streaming import StreamedModel
from neuronmm.compression.workspace import Workspace
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS, family_of
from neuronmm.models.load import load_tokenizer
from neuronmm.models.source import read_config, resolve
from neuronmm.models.spec import CompressionSpec


def compress(
    model: str | Path,
    out: str | Path,
    config: CompressionConfig | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    device: str = "cpu",
    store: Path | None = None,
    progress: Progress = lambda stage, share: None,
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
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device}: torch sees no CUDA GPU; install a CUDA build of torch, or use cpu")
    config = config or CompressionConfig()
    out = Path(out).expanduser().absolute()
    folder = resolve(model)
    settings = read_config(folder)
    family_of(settings, str(folder / "config.json"))
    if "quantization_config" in settings:
        raise UserError(f"{folder}: is already compressed or quantised; compress the original checkpoint")
    reader = Reader(folder)
    linears = targeted(reader, settings["num_hidden_layers"], config.targets)
    plan = make_plan(linears, config)
    total = sum(_size(reader, name) for name in reader.names)
    trained = 0  # LoRA's adapters are next to nothing
    if config.recover == "factors":
        trained = sum(linear.kept(plan.ranks[linear.name]) for linear in plan.linears)
    _check_disk(out, reader.total_bytes(), trained, config)
    if config.recover != "off":
        _check_memory(total, trained)
    run = {"model": str(folder), "bytes": reader.total_bytes(), "version": version("neuronmm"), "device": device}
    run |= config.model_dump()
    workspace = Workspace(out, run, resume, force)

    rows: Tensor | None = None
    common = _store(store, run, config) if store is not None and config.needs_text else None
    if config.needs_text:
        kept = workspace.load("calibration")  # a resumed run's
        if kept is None:
            make = partial(_calibration_tokens, folder, config, progress, device)
            kept = {"tokens": make() if common is None else common.tokens(make)}
            workspace.save("calibration", kept)
        rows = kept["tokens"]
    found = workspace.layers_done()
    streamed = StreamedModel(folder, torch.float32, device)
    if rows is not None and needs_spectra(config):
        plan = make_plan(linears, config, measure(streamed, linears, rows, config, workspace, common, progress))
    _layers(streamed, plan, rows, config, workspace, common, progress)

    layers = workspace.layer_facts(settings["num_hidden_layers"])
    spec = _spec(config, plan, rows, total)
    done = {"kind": "measured", "model": str(model), **_facts(config, spec, plan, total, layers)}

    def texts(finished: Path) -> dict[str, str]:
        if config.recover != "off":
            assert rows is not None
            done["recovery"] = recover(
                finished,
                rows,
                recovery_of(config, device),
                progress,
                dense=folder,
                device=device,
                work=workspace.folder,
            )
        if config.factors == "int8":
            store_int8(finished)
        done["bytes"] = {"dense": reader.total_bytes(), "compressed": Reader(finished).total_bytes()}
        # A resumed run counts the layers and passes that it found done; those of this run lie within its own time.
        before = sum(layer["seconds"] for layer in layers[:found])
        before += done["recovery"]["resumed_seconds"] if done["recovery"] else 0.0
        done["seconds"] = before + time.perf_counter() - began + (common.seconds if common is not None else 0.0)
        done["peak_rss_bytes"] = max(peak_rss(), *(layer["peak_rss_bytes"] for layer in layers))
        return {"compression_report.json": report.as_json(done), "compression_report.md": report.as_markdown(done)}

    others = [name for name in reader.names if not name.startswith(f"{LAYERS}.")]
    compressed = {**settings, "quantization_config": spec.model_dump()}
    workspace.finish(reader, others, settings["num_hidden_layers"], compressed, texts)
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
        version=version("neuronmm"),
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


def recovery_of(config: CompressionConfig, device: str) -> Recovery:
    """How ``recover`` trains: SVD-LLM's two stages of LoRA, or the factors themselves, which learn faster.

    A step of the factors is one pass of the model: with long rows, eight of them a step would be very few steps.
    """
    shared = {"seed": config.seed, "autocast": multiplies_bf16(torch.device(device))}
    if config.recover == "lora":
        return Recovery(**shared)
    batch = rows_a_pass(config.calibration_length)
    return Recovery(rank=0, two_stage=False, learning_rate=1e-4, epochs=2, batch=batch, **shared)


def _store(folder: Path, run: dict[str, Any], config: CompressionConfig) -> CalibrationStore:
    """The store of runs that agree with this one in all that calibration tokens and moments depend on."""
    keys = ("model", "bytes", "version", "device", "calibration", "calibration_rows", "calibration_length", "seed")
    return CalibrationStore(folder, {key: run[key] for key in keys}, config.targets)


def _size(reader: Reader, name: str) -> int:
    return int(torch.Size(reader.shape(name)).numel())


def _check_disk(out: Path, dense: int, trained: int, config: CompressionConfig) -> None:
    """Parts and final shards lie on the disk together, twice the (at most ``dense``) bytes, and recovery's state.

    What is replaced is written anew beside the old: the state after each pass, the shards when all has been trained.
    """
    state = 16 * trained
    replaced = dense if config.recover != "off" or config.factors == "int8" else 0
    needed = 2 * dense + state + max(state, replaced)
    parent = next(folder for folder in out.parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(f"{parent}: {free / 1e9:.1f} GB free, about {needed / 1e9:.1f} GB needed; free some or move -o")


def _check_memory(parameters: int, trained: int) -> None:
    """Recovery holds the model in float32, and the factors' gradients, moments and best state."""
    needed, free = 4 * parameters + 16 * trained, psutil.virtual_memory().available
    if free < needed:
        raise UserError(
            f"recover: {free / 1e9:.1f} GB of memory available, about {needed / 1e9:.1f} GB needed; refine trains "
            "block by block instead"
        )


def _calibration_tokens(folder: Path, config: CompressionConfig, progress: Progress, device: str = "cpu") -> Tensor:
    """The calibration tokens [rows, length] of a dense checkpoint: read from a file, or sampled from the model.

    Raises:
        UserError: the calibration file or the checkpoint cannot be used.
    """
    tokenizer = load_tokenizer(folder)
    rows = calibration.Rows(config.calibration_rows, config.calibration_length, config.seed)
    if config.calibration != calibration.SELF:
        return calibration.from_file(Path(config.calibration), tokenizer, rows)
    dtype = Reader(folder)[f"{LAYERS}.0.mlp.down_proj.weight"].dtype
    model = StreamedModel(folder, dtype, device)
    return calibration.from_model(model, tokenizer, rows, lambda share: progress("sampling text", share))


@torch.no_grad()
def _layers(
    model: StreamedModel,
    plan: Plan,
    rows: Tensor | None,
    config: CompressionConfig,
    workspace: Workspace,
    store: CalibrationStore | None,
    progress: Progress,
) -> None:
    """Compress layer by layer, from the first one that is not done yet."""
    first = workspace.layers_done()
    progress("compressing", first / len(model))
    streams: Streams = {}
    rotary = None
    measured = store is not None and store.complete(len(model))
    if rows is not None and first < len(model) and not (measured and config.streams == ("dense",)):
        streams = workspace.load(f"hidden-{first:05d}") or {name: model.embed(rows) for name in config.streams}
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


def _block_loss(layers: list[dict[str, Any]]) -> dict[str, float] | None:
    """The refinement's held-out losses, averaged over the layers."""
    losses = [layer["refinement"] for layer in layers if "refinement" in layer]
    if not losses:
        return None
    return {when: sum(loss[f"loss_{when}"] for loss in losses) / len(losses) for when in ("before", "after")}
