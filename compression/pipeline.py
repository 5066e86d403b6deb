"""The verb ``compress``: plan the ranks, then factorise, refine and write a checkpoint layer by layer."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from neuronmm.compression import report
from neuronmm.compression.budget import find_ratio
from neuronmm.compression.calibration import calibration_tokens
from neuronmm.compression.calibration_store import STORE, CalibrationStore, SharedStore, stored_bytes
from neuronmm.compression.checkpoint import assemble
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.distillation import working_memory
from neuronmm.compression.fidelity import compare
from neuronmm.compression.fisher import measure_gradients, working_bytes
from neuronmm.compression.identity import name_of_model, of_model, of_run, of_texts, of_weights
from neuronmm.compression.layer import compress_layer
from neuronmm.compression.member import check_processes, check_rows, workspace_of
from neuronmm.compression.memory import check_disk, check_room, check_row_memory, forget_peak, peak_rss
from neuronmm.compression.plan import Plan, has_spectra, make_plan, measure_spectra, targeted
from neuronmm.compression.ranks import Linear, realised
from neuronmm.compression.reader import Reader
from neuronmm.compression.recover import last_steps
from neuronmm.compression.run import Run, check_device
from neuronmm.compression.streaming import StreamedModel
from neuronmm.compression.workspace import Workspace
from neuronmm.models import processes
from neuronmm.models.contents import Contents, inspect
from neuronmm.models.documents import read_own
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS
from neuronmm.models.model_config import ModelConfig
from neuronmm.models.progress import Progress, no_progress
from neuronmm.models.source import is_compressed, resolve
from neuronmm.models.spec import CompressionSpec
from neuronmm.models.tensors import parameter_shapes
from neuronmm.version import VERSION


def compress(
    model: str | Path,
    out: str | Path,
    config: CompressionConfig | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    device: str = "cpu",
    store: str | Path | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Write a low-rank version of ``model`` to the folder ``out`` and return the report.

    Args:
        model: a Hugging Face folder, a GGUF file or a hub id.
        out: the folder of the new checkpoint; it appears only when it is complete.
        config: the settings; None takes the defaults of :class:`CompressionConfig`.
        resume: continue an interrupted run of the same settings.
        force: replace ``out`` if it exists.
        device: torch's name of the device on which layers run and train: ``cpu`` or ``cuda``.
        store: a folder for the calibration's tokens and moments, which several runs on one text share, one at a time.
        progress: called whenever a fraction of a stage is done.

    The processes that torchrun started share the calibration rows: each runs some of them, and the sums are added up.
    The first process writes the checkpoint and returns its report.

    Raises:
        UserError: the request or the checkpoint is at fault; the message says what to change.
        ProcessLost: another process has ended.

    Examples:
        >>> import neuronmm
        >>> from neuronmm.compression.config import CompressionConfig
        >>> report = neuronmm.compress("llama", "llama-small", CompressionConfig(ratio=0.3, method="svd"))
        >>> report["matrices"][0]["name"], report["asked_ratio"]
        ('model.layers.0.self_attn.q_proj', 0.3)
    """
    began = time.perf_counter()
    forget_peak()
    check_device(device)
    config = config or CompressionConfig()
    check_processes(config)
    with workspace_of(out, (model, *config.text_files, store), resume=resume, force=force) as workspace:
        dense, contents = processes.in_turn(lambda: _open(model, workspace, progress))
        plan = make_plan(targeted(dense, contents.config.num_hidden_layers, config), config)
        texts = of_texts(config)
        processes.in_turn(lambda: _begin(config, texts, workspace, dense, contents.config, device, plan, store))
        weights = of_weights(dense) if processes.rank() == 0 else None
        run = Run(config, workspace, dense, device, _store(store, workspace, dense, device, config), progress)

        rows, held_out = calibration_tokens(run)
        check_rows(rows, held_out, config)
        factorised = _factorised(run, plan.linears, contents.config.num_hidden_layers)
        if config.needs_text and not factorised:
            count = len(rows) + len(held_out)  # rows that were kept have to fit, too
            check_row_memory(count, rows.shape[1], contents.config.hidden_size, config, device)
            if processes.rank() == 0:
                states = _state_bytes(run, rows, contents.config)
                check_disk(workspace.out, dense.total_bytes() + _moment_bytes(config, plan, store) + states)
            processes.meet()  # before another process removes files that count as free
        streamed = StreamedModel(dense.folder, torch.float32, device)
        search = None
        if _needs_gradients(config) and not factorised:
            measured = all(run.store.has_gradients(index) for index in range(contents.config.num_hidden_layers))
            if processes.rank() == 0 and not measured:
                needed = _moment_bytes(config, plan, store) + working_bytes(rows.numel(), contents.config)
                check_disk(workspace.out, needed, ("moments/*", "inputs-*", "gradient-*"))
            processes.meet()  # before another process removes such files
            measure_gradients(run, streamed, plan.linears, rows)
        if config.needs_spectra:
            linears, spectra = plan.linears, measure_spectra(run, streamed, plan.linears, rows)
            if config.budget is not None:
                ratio, search = find_ratio(run, streamed, linears, spectra, held_out)
                run = replace(run, config=config.model_copy(update={"ratio": ratio}))
            plan = processes.of_first(make_plan(linears, run.config, spectra))
        resumed_layers = _compress_layers(run, streamed, plan, rows) if config.factorises else 0
        processes.meet()
        if processes.rank() == 0:
            shutil.rmtree(workspace.moments, ignore_errors=True)  # make room for the checkpoint

        layers = workspace.layer_facts(len(streamed)) if config.factorises else []
        del streamed  # what follows needs the memory
        counted = parameter_shapes(contents.config, None)
        parameters = sum(math.prod(shape) for name, shape in counted.items() if name in contents.files)
        spec = _spec(run, plan, rows, layers, parameters, texts)
        facts = _facts(run, spec, plan, layers, parameters)
        origin = {"model": name_of_model(model), "content_of_model": weights}
        result = {"kind": "measured", **origin, **facts, "search": search}

        def finish(final: Path) -> None:
            if processes.rank() == 0:
                _assemble(run, final, contents, spec)
            processes.meet()
            recovery = result["recovery"] = last_steps(run, final, rows)
            result["fidelity"] = compare(run, final, held_out, rows)
            # A resumed run adds the time of the layers and epochs that the interrupted run finished.
            earlier = sum(layer["seconds"] for layer in layers[:resumed_layers])
            earlier += recovery["resumed_seconds"] if recovery else 0.0
            result["bytes"] = {"dense": dense.total_bytes(), "compressed": Reader(final).total_bytes()}
            result["seconds"] = earlier + time.perf_counter() - began + run.store.seconds
            result["peak_rss_bytes"] = max(
                [*processes.of_all(peak_rss()), *(layer["peak_rss_bytes"] for layer in layers)]
            )
            if processes.rank() == 0:
                report.write(result, final)

        workspace.finish(finish)
        return result


def _open(model: str | Path, workspace: Workspace, progress: Progress) -> tuple[Reader, Contents]:
    """Find the dense checkpoint and read its config.json and headers.

    Raises:
        UserError: as :func:`open_dense`, or it is missing or in the way of ``workspace``.
    """
    folder = resolve(model, progress)
    workspace.protect(folder)
    return open_dense(folder)


def open_dense(folder: Path) -> tuple[Reader, Contents]:
    """Return a reader of the checkpoint to compress, and what its config.json and headers say.

    Raises:
        UserError: it is unsupported, damaged, compressed or quantised.
    """
    if is_compressed(folder):
        raise UserError(f"{folder}: is already compressed or quantised; compress the original checkpoint")
    contents = inspect(folder)
    return Reader(folder, contents.files), contents


def _begin(
    config: CompressionConfig,
    texts: dict[str, Any],
    workspace: Workspace,
    dense: Reader,
    sizes: ModelConfig,
    device: str,
    plan: Plan,
    store: str | Path | None,
) -> None:
    """Check disk, memory and weights, and start or resume the run in ``workspace``; ``texts`` has their digests.

    Raises:
        UserError: there is too little room, the run to resume had other settings, or a weight is not finite.
    """
    size, moments = dense.total_bytes(), _moment_bytes(config, plan, store)
    # The layers' files are on the disk together with the moments, unless a store has these, and later with the shards.
    first = processes.rank() == 0
    if first:
        before, parameters = size + max(size, moments), dense.total_parameters()
        working = working_memory(sizes, config)
        check_room(workspace.out, before, size, parameters, plan.parameters, working, config, device)
    workspace.begin({**of_model(dense), **of_run(device), **config.model_dump(), **texts})
    if first:
        dense.check_finite()


def _factorised(run: Run, linears: list[Linear], layers: int) -> bool:
    """Return whether an interrupted run has planned and compressed all layers, and needs the moments no more."""
    planned = not run.config.needs_spectra or has_spectra(run, linears, layers)
    return planned and run.workspace.layers_done(layers, ()) == layers


def _moment_bytes(config: CompressionConfig, plan: Plan, store: str | Path | None) -> int:
    """Return the size of the moments that the run keeps on the disk itself, because it has no store in a folder."""
    if store is not None or not _reads_moments_twice(config):
        return 0
    return stored_bytes(plan.linears, gradients=_needs_gradients(config))


def _state_bytes(run: Run, rows: Tensor, sizes: ModelConfig) -> int:
    """Return the size of the hidden states of a layer's inputs and outputs, which a run saves between layers.

    With the moments of all layers the dense model need not run again; those of ``fisher`` have room of their own.
    """
    config = run.config
    stored = _needs_gradients(config) or run.store.complete(sizes.num_hidden_layers)
    if not config.factorises or (stored and config.streams == ("dense",)):
        return 0
    return 2 * len(config.streams) * torch.float32.itemsize * rows.numel() * sizes.hidden_size


def _store(
    folder: str | Path | None, workspace: Workspace, dense: Reader, device: str, config: CompressionConfig
) -> CalibrationStore:
    """Return the store in ``folder``, or without one a store for a run that needs the moments twice."""
    if folder is None and _reads_moments_twice(config):
        folder = workspace.moments
        if processes.rank() == 0 and read_own(folder / STORE) is None:  # it is missing or damaged
            shutil.rmtree(folder, ignore_errors=True)
    if folder is None or not config.needs_text:
        return CalibrationStore()
    return SharedStore(folder, dense, device, config)


def _reads_moments_twice(config: CompressionConfig) -> bool:
    """Return whether the dense model's moments decide the ranks and then the factors, or go with the gradients'."""
    return _needs_gradients(config) or (config.needs_spectra and config.method != "anchored")


def _needs_gradients(config: CompressionConfig) -> bool:
    return config.method == "fisher" and config.factorises


@torch.no_grad()
def _compress_layers(run: Run, model: StreamedModel, plan: Plan, rows: Tensor) -> int:
    """Compress every layer that an interrupted run has not finished; return the number of those it has."""
    needs_dense_run = not run.store.complete(len(model))
    names = run.config.streams if len(rows) and (needs_dense_run or run.config.streams != ("dense",)) else ()
    first = min(processes.of_all(run.workspace.layers_done(len(model), names)))
    if first == len(model):
        run.progress("compressing", 1.0)
        return first
    saved = run.workspace.load(f"hidden-{first:05d}", names) if first and names else None
    if first and names and any(processes.of_all(saved is None)):  # its header can be read, the states cannot
        first, saved = 0, None
    run.progress("compressing", first / len(model))
    streams = model.streams(processes.part(rows), names, saved)
    refinement = 0.9 if run.config.refine != "off" else 0.0  # fraction of a layer's time that refinement takes
    for index in range(first, len(model)):
        began = time.perf_counter()
        tensors, facts = compress_layer(
            run, plan, model, index, streams, lambda f: run.progress("compressing", refinement * f / len(model))
        )
        if names and index + 1 < len(model):
            run.workspace.save(f"hidden-{index + 1:05d}", streams.states())
        facts |= {"seconds": time.perf_counter() - began, "peak_rss_bytes": peak_rss()}
        run.workspace.save_layer(index, tensors, facts)
        processes.meet()  # all have the next states
        run.workspace.drop(f"hidden-{index:05d}")
        model.reader.close()  # pages of a mapped shard count as resident
        run.progress("compressing", (1 - refinement) / len(model))
    return first


def _assemble(run: Run, final: Path, contents: Contents, spec: CompressionSpec) -> None:
    """Write the checkpoint ``final`` from the layers' files and the dense checkpoint, not yet rounded."""
    layer_files, others = list[Path](), run.dense.names
    if run.config.factorises:
        layer_files = [run.workspace.part(index) for index in range(contents.config.num_hidden_layers)]
        others = [name for name in others if not name.startswith(f"{LAYERS}.")]
    assemble(final, run.dense, others, layer_files, {**contents.settings, "quantization_config": spec.model_dump()})


def _spec(
    run: Run, plan: Plan, rows: Tensor, layers: list[dict[str, Any]], parameters: int, texts: dict[str, Any]
) -> CompressionSpec:
    """Return the ``quantization_config`` of the checkpoint; ``parameters`` are those of the dense model."""
    config, text = run.config, None
    if len(rows):
        text = {"source": config.calibration, "rows": len(rows), "length": rows.shape[1], "seed": config.seed}
        text |= {"asked_rows": config.calibration_rows, **texts}
    forms = {name: form for layer in layers for name, form in layer["forms"].items()}
    return CompressionSpec(
        format=2 if forms else 1 if plan.part_ranks else 3,
        ranks=plan.part_ranks,
        shared=plan.shared,
        forms=forms,
        method=config.method,
        targets=config.targets,
        asked_ratio=config.ratio,
        realised_ratio=realised(plan.linears, plan.ranks),
        model_ratio=plan.removed / parameters,
        align=plan.align,
        calibration=text,
        version=VERSION,
    )


def _facts(
    run: Run, spec: CompressionSpec, plan: Plan, layers: list[dict[str, Any]], parameters: int
) -> dict[str, Any]:
    """Return the content of the report, except for times, sizes and the facts of the recovery."""
    matrices = [matrix for layer in layers for matrix in layer["matrices"]]
    errors = [matrix["relative_error"] for matrix in matrices if matrix["rank"] is not None]
    return {
        **spec.model_dump(exclude={"ranks", "shared", "forms", "factors", "weights", "quant_method"}),
        **({"format": 3} if run.config.needs_format_3 else {}),
        **run.config.model_dump(include=set(report.SETTINGS)),
        "asked_align": run.config.align,
        "parameters": {"dense": parameters, "compressed": parameters - plan.removed},
        "mean_relative_error": sum(errors) / max(len(errors), 1),
        "block_loss": _block_loss(layers),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "matrices": matrices,
        "recovery": None,
        "fidelity": None,
        "conversions": [],
    }


def _block_loss(layers: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return the held-out losses of the refinement, averaged over the layers; None without refinement.

    In the pivoted form they are of the two factors, before the change of form and its rounding.
    """
    losses = [layer["refinement"] for layer in layers if "refinement" in layer]
    if not losses:
        return None
    return {when: sum(loss[f"loss_{when}"] for loss in losses) / len(losses) for when in ("before", "after")}
