"""The verb ``convert``: write a compressed checkpoint in the other form of its factors, the same function.

One decoder layer at a time is read, converted in float64 and rounded to the dtype in which it is stored.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from neuronmm.compression import report
from neuronmm.compression.checkpoint import assemble
from neuronmm.compression.identity import of_model
from neuronmm.compression.memory import check_disk, forget_peak, peak_rss
from neuronmm.compression.pivoting import LayerFactors, forms_of, in_order, to_pivoted, to_two
from neuronmm.compression.ranks import Linear
from neuronmm.compression.reader import Reader
from neuronmm.compression.run import check_device
from neuronmm.compression.workspace import Workspace
from neuronmm.kernels import LowRank
from neuronmm.kernels.low_bits import dense
from neuronmm.models.contents import Contents, inspect
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS
from neuronmm.models.progress import Progress, no_progress
from neuronmm.models.source import is_compressed, resolve
from neuronmm.models.spec import CompressionSpec, bias_name
from neuronmm.models.tensors import IGNORED, check_finite, check_pivots
from neuronmm.version import VERSION


def convert(
    model: str | Path,
    out: str | Path,
    form: Literal["two", "pivoted"] = "pivoted",
    *,
    resume: bool = False,
    force: bool = False,
    device: str = "cpu",
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Write the checkpoint ``model`` with its factors in ``form`` to the folder ``out`` and return the updated report.

    Args:
        model: a checkpoint that ``compress`` or ``recover`` wrote: a folder or a hub id. It does not change.
        out: the folder of the new checkpoint; it appears only when it is complete.
        form: two plain factors, or the smaller pivoted factors.
        resume: continue an interrupted run of the same settings.
        force: replace ``out`` if it exists.
        device: torch's name of the device to compute on: ``cpu`` or ``cuda``.
        progress: called at every step.

    Raises:
        UserError: the request or the checkpoint is at fault; the message says what to change.
    """
    began = time.perf_counter()
    forget_peak()
    check_device(device)
    with Workspace(out, (model,), resume=resume, force=force) as workspace:
        folder = resolve(model)
        workspace.protect(folder)
        contents, spec = _open(folder, form)
        result, low = report.read(folder), Reader(folder, contents.files)
        _begin(workspace, low, spec, form, device)
        layers = contents.config.num_hidden_layers
        first = workspace.layers_done(layers, ())
        progress("converting", first / layers)
        for index in range(first, layers):
            layer_began = time.perf_counter()
            tensors, facts = _convert_layer(low, spec, f"{LAYERS}.{index}.", form, torch.device(device))
            facts |= {"seconds": time.perf_counter() - layer_began, "peak_rss_bytes": peak_rss()}
            workspace.save_layer(index, tensors, facts)
            low.close()  # pages of a mapped shard count as resident
            progress("converting", 1 / layers)
        layer_facts = workspace.layer_facts(layers)
        forms = {name: entry for layer in layer_facts for name, entry in layer["forms"].items()}
        conditions = {name: value for layer in layer_facts for name, value in layer["conditions"].items()}
        new = _update(result, spec, form, forms, conditions)

        def finish(final: Path) -> None:
            others = [name for name in low.names if not name.startswith(f"{LAYERS}.")]
            settings = {**contents.settings, "quantization_config": new.model_dump()}
            assemble(final, low, others, [workspace.part(index) for index in range(layers)], settings)
            result["bytes"]["compressed"] = Reader(final).total_bytes()
            result["seconds"] += sum(layer["seconds"] for layer in layer_facts[:first]) + time.perf_counter() - began
            peaks = (layer["peak_rss_bytes"] for layer in layer_facts)
            result["peak_rss_bytes"] = max(peak_rss(), result["peak_rss_bytes"], *peaks)
            report.write(result, final)

        workspace.finish(finish)
        return result


def _open(folder: Path, form: str) -> tuple[Contents, CompressionSpec]:
    """Return the contents and the spec of a checkpoint that can be converted to ``form``.

    Raises:
        UserError: it is not compressed, its factors have few bits, or it has that form already.
    """
    contents = inspect(folder) if is_compressed(folder) else None
    if contents is None or contents.spec is None:
        raise UserError(f"{folder}: is not compressed, so it has no factors to convert; use compress --form {form}")
    if not contents.spec.ranks:
        raise UserError(
            f"{folder}: its weights are rounded only, so it has no factors to convert; use compress --ratio"
        )
    if contents.spec.weights != "model":
        raise UserError(f"{folder}: {contents.spec.weights} weights cannot be converted; compress with --form {form}")
    if contents.spec.factors != "model":
        raise UserError(
            f"{folder}: {contents.spec.factors} factors cannot be converted; convert the checkpoint that they were made"
            " from"
        )
    if (form == "pivoted") == bool(contents.spec.forms):
        raise UserError(f"{folder}: has the form {form} already; there is nothing to convert")
    return contents, contents.spec


def _begin(workspace: Workspace, low: Reader, spec: CompressionSpec, form: str, device: str) -> None:
    """Check the disk, and start or resume the run in ``workspace``; ``low`` reads the checkpoint.

    Raises:
        UserError: there is too little room, or the run to resume had other settings.
    """
    size = low.total_bytes()
    # Pivoted factors are smaller. Each linear that loses its pivots gets the r x r block that they saved.
    grown = size + sum(8 * spec.ranks[name] ** 2 for name in spec.forms)
    # The layers' files and the final shards are on the disk together.
    check_disk(workspace.out, 2 * grown)
    workspace.begin({"verb": "convert", **of_model(low), "form": form, "version": VERSION, "device": device})


@torch.no_grad()
def _convert_layer(
    low: Reader, spec: CompressionSpec, prefix: str, form: str, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of one converted decoder layer by full name, and its facts.

    Raises:
        UserError: a weight is not finite, or pivots are out of range or order.
    """
    layer = _read_layer(low, spec, prefix, device)
    converted = to_pivoted(layer) if form == "pivoted" else to_two(layer)
    tensors: dict[str, Tensor] = {}
    for inside, factors in converted.low_rank.items():
        name = prefix + inside
        dtype = low[f"{name}.B.weight"].dtype
        if inside not in converted.shared:
            tensors[f"{name}.A.weight"] = _stored(factors.A, dtype)
        tensors[f"{name}.B.weight"] = _stored(factors.B, dtype)
        if factors.bias is not None:
            tensors[bias_name(name, factors.form)] = factors.bias
        if isinstance(factors.pivots, Tensor):
            tensors[f"{name}.pivots"] = factors.pivots
    factorised = tuple(f"{prefix}{inside}." for inside in layer.low_rank)
    for name in low.under(prefix):
        if not name.startswith(factorised) and not name.endswith(IGNORED):
            tensors[name] = in_order(name.removeprefix(prefix), low[name], converted.order)
    facts = {
        "forms": forms_of(converted.low_rank, prefix),
        "conditions": {prefix + inside: value for inside, value in converted.conditions.items()},
    }
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, facts


def _read_layer(low: Reader, spec: CompressionSpec, prefix: str, device: torch.device) -> LayerFactors:
    """Return the factorised linears of the layer ``prefix``, in the dtype in which they are stored, on ``device``."""

    def read(name: str) -> Tensor:
        tensor = low[name].to(device, copy=True)  # a view would keep the shard mapped
        check_finite(name, tensor, low.folder)
        return tensor

    names = [name for name in spec.ranks if name.startswith(prefix)]
    layer = LayerFactors({}, {name.removeprefix(prefix): spec.shared[name].removeprefix(prefix)
                              for name in names if name in spec.shared})  # fmt: skip
    stored = set(low.under(prefix))
    for name in sorted(names, key=lambda name: name in spec.shared):  # leaders first
        inside, entry = name.removeprefix(prefix), spec.forms.get(name)
        form = spec.form_of(name)
        leader = layer.shared.get(inside)
        A = read(f"{name}.A.weight") if leader is None else layer.low_rank[leader].A
        bias = bias_name(name, form)
        factors = LowRank(A, read(f"{name}.B.weight"), read(bias) if bias in stored else None, form)
        if entry is not None and entry.first is not None:
            factors = factors._replace(pivots=entry.first)
        elif entry is not None and entry.indexed:
            pivots = read(f"{name}.pivots")
            check_pivots(f"{name}.pivots", pivots, factors.out_features, low.folder)
            factors = factors._replace(pivots=pivots)
        layer.low_rank[inside] = factors
    return layer


def _stored(factor: Any, dtype: torch.dtype) -> Tensor:
    return dense(factor, torch.float64).to(dtype)


def _update(
    result: dict[str, Any],
    spec: CompressionSpec,
    form: str,
    forms: dict[str, Any],
    conditions: dict[str, float | None],
) -> CompressionSpec:
    """Return the spec of the converted checkpoint, and update the report ``result`` in place."""
    for matrix in result["matrices"]:
        name, (out_features, in_features) = matrix["name"], matrix["shape"]
        kept = Linear(name, out_features, in_features, pivoted=name in forms).parameters(matrix["rank"])
        matrix["kept_parameters"], matrix["realised_ratio"] = kept, 1 - kept / matrix["dense_parameters"]
        matrix["pivot_condition"] = conditions.get(name)
    targeted, kept = (sum(one[key] for one in result["matrices"]) for key in ("dense_parameters", "kept_parameters"))
    parameters = result["parameters"]
    parameters["compressed"] = parameters["dense"] - (targeted - kept)
    changes = {
        "format": 2 if forms else 1,
        "realised_ratio": 1 - kept / targeted,
        "model_ratio": (targeted - kept) / parameters["dense"],
        "version": VERSION,
    }
    before = {"form": result.get("form", "two"), "recovered": result["recovery"] is not None}
    result["conversions"] = [*result["conversions"], before]
    if result.get("fidelity"):
        result["fidelity"]["converted_since"] = True
    result |= {**changes, "form": form}
    return CompressionSpec.model_validate({**spec.model_dump(), **changes, "forms": forms})
