"""Round the weights of a finished checkpoint to few bits: what stays dense, and two factors to int4.

int4 is fitted to the calibration text (:mod:`~neuronmm.compression.error_feedback`): the layers are rounded in order,
each for the inputs that it has behind the embedding and the layers that are rounded already. Embedding and head become
int8. int8 is plain rounding, which is nearly exact (docs/results/low_bits.md), and so is dense int4 without text. A
plain rounding gives what ``--weight-dtype`` gives when a model is loaded, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm.compression.checkpoint import rewrite
from neuronmm.compression.error_feedback import ErrorFeedback
from neuronmm.compression.factor_rounding import round_two
from neuronmm.compression.moments import check_finite, leaders_of
from neuronmm.compression.reader import Reader
from neuronmm.compression.run import Run
from neuronmm.compression.streaming import StreamedModel, advance
from neuronmm.kernels import Int4, Int8, quantise, quantise_int4
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS, LINEARS
from neuronmm.models.lowrank import LowRankLinear
from neuronmm.models.source import read_config
from neuronmm.models.tensors import EMBEDDING, HEAD

_STAGE = "rounding"

Linears = dict[str, Any]
"""Dense linears (``nn.Linear``) and, if their factors are rounded, low-rank ones, by their names inside the layer."""


@torch.no_grad()
def store_low_bits(run: Run, folder: Path, rows: Tensor) -> None:
    """Rewrite the checkpoint in ``folder`` with the run's ``weight_dtype``, and factors in int4; update config.json.

    Args:
        run: the run.
        folder: a checkpoint in which the dense weights are floats, and the factors if they are to become int4.
        rows: the calibration tokens [rows, length]; there may be none.

    Raises:
        UserError: activations hold NaN or infinity, or the disk is full; the checkpoint is then untouched.
    """
    dtype, factors = run.config.weight_dtype, run.config.factor_dtype == "int4"
    tied = bool(read_config(folder).get("tie_word_embeddings"))
    fitted = _fit(run, folder, rows) if factors or (dtype == "int4" and len(rows)) else {}

    def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        result = dict[str, Tensor]()
        for name, weight in tensors.items():
            table = name in (EMBEDDING, HEAD)
            if name in fitted:
                result |= {key: fitted[name][key].contiguous() for key in (name, f"{name}_scale")}
            elif dtype == "model" or not (table or _is_dense(name)):
                result[name] = weight
            elif name != HEAD or not tied:
                low = quantise_int4(weight) if dtype == "int4" and not table else quantise(weight)
                result |= {name: low.values, f"{name}_scale": low.scales}
        return result

    rewrite(folder, rounded, {"format": 3, "weights": dtype, **({"factors": "int4"} if factors else {})})


def _is_dense(name: str) -> bool:
    """Return whether a tensor is the weight of a linear that is not factorised."""
    return name.startswith(f"{LAYERS}.") and name.endswith(tuple(f".{inside}.weight" for inside in LINEARS.values()))


def _fit(run: Run, folder: Path, rows: Tensor) -> dict[str, Reader]:
    """Round the linears layer by layer, and return a reader of the result for each tensor's name.

    Without rows only the factors are rounded, as if all inputs were of one size. A resumed run continues after the last
    rounded layer.
    """
    model = StreamedModel(folder, torch.float32, run.device)
    first, state = run.workspace.latest("rounding", ["hidden"])
    if not run.workspace.complete([_layer(index) for index in range(first)], []):
        first = 0
    hidden = state["hidden"].to(run.device) if first else model.embed(rows)
    if not first and run.config.weight_dtype != "model":  # the embedding becomes int8, row by row
        hidden = quantise(hidden.flatten(0, 1)).dequantise(torch.float32).view_as(hidden)
    rotary = model.streams(rows, ()).rotary
    run.progress(_STAGE, first / len(model))
    for index in range(first, len(model)):
        with model.layer(index) as layer:
            linears = _rounded_linears(run, layer, bool(len(rows)))
            with _input_grams(linears) as grams:
                _advance(layer, hidden, rotary)
            try:
                tensors = _round(run, linears, grams)
            except ValueError as error:
                raise UserError(
                    f"{folder}: {LAYERS}.{index}.*: {error}; the checkpoint is damaged or unstable in float32"
                ) from None
            hidden = _advance(layer, hidden, rotary)
        run.workspace.save(_layer(index), {f"{LAYERS}.{index}.{name}": one.cpu() for name, one in tensors.items()})
        run.workspace.save(f"rounding-{index + 1:05d}", {"hidden": hidden})
        run.workspace.drop(f"rounding-{index:05d}")
        model.reader.close()  # pages of a mapped shard count as resident
        run.progress(_STAGE, 1 / len(model))
    files = [Reader.of_file(run.workspace.folder / f"{_layer(index)}.safetensors") for index in range(len(model))]
    return {name: file for file in files for name in file.names}


def _advance(layer: nn.Module, hidden: Tensor, rotary: Any) -> Tensor:
    return advance(layer, hidden, rotary) if len(hidden) else hidden


def _rounded_linears(run: Run, layer: nn.Module, text: bool) -> Linears:
    """Return the linears of a layer that this pass rounds."""
    parts = {name: layer.get_submodule(name) for name in LINEARS.values()}
    dense, factors = run.config.weight_dtype, run.config.factor_dtype == "int4"
    taken = dense == "int8" or (dense == "int4" and text)
    return {
        name: part
        for name, part in parts.items()
        if (taken and isinstance(part, nn.Linear)) or (factors and isinstance(part, LowRankLinear))
    }


def _layer(index: int) -> str:
    return f"rounded-{index:05d}"


def _round(run: Run, linears: Linears, grams: dict[str, Tensor]) -> dict[str, Tensor]:
    """Round ``linears`` of a layer in place and return their tensors by name inside the layer.

    ``grams`` has the Gram matrix of the inputs for the first linear of those with one input.

    Raises:
        ValueError: the activations hold NaN or infinity.
    """
    tensors, leaders = dict[str, Tensor](), leaders_of(list(linears))
    for leader in dict.fromkeys(leaders.values()):
        gram = grams.get(leader)
        feedback = ErrorFeedback(torch.eye(linears[leader].in_features, device=run.device) if gram is None else gram)
        check_finite(feedback.gram)
        by_a: dict[int, list[str]] = {}
        for name in (name for name in linears if leaders[name] == leader):
            linear = linears[name]
            if isinstance(linear, LowRankLinear):
                by_a.setdefault(id(linear.A), []).append(name)
                continue
            int4 = run.config.weight_dtype == "int4"
            tensors |= _replace(linear, name, feedback.int4(linear.weight) if int4 else quantise(linear.weight))
        for names in by_a.values():
            owner = next(name for name in names if "A" in dict(linears[name].named_children()))
            A, parts = round_two(feedback, linears[owner].A.weight, [linears[name].B.weight for name in names])
            tensors |= _replace(linears[owner].A, f"{owner}.A", A)
            for name, part in zip(names, parts, strict=True):
                tensors |= _replace(linears[name].B, f"{name}.B", part)
    return tensors


def _replace(linear: nn.Linear, name: str, matrix: Int8 | Int4) -> dict[str, Tensor]:
    """Give ``linear`` the values of ``matrix`` and return its two tensors."""
    linear.weight = nn.Parameter(matrix.dequantise(torch.float32), requires_grad=False)
    return {f"{name}.weight": matrix.values, f"{name}.weight_scale": matrix.scales}


@contextmanager
def _input_grams(linears: Linears) -> Iterator[dict[str, Tensor]]:
    """Add up the Gram matrices [in, in], float64, of the inputs of ``linears`` in the ``with`` block.

    Linears with one input have one, under the name of the first of them. The products are float64: in float32 a massive
    activation would hide all small directions (:mod:`~neuronmm.compression.moments`).
    """
    grams = dict[str, Tensor]()

    def adder(name: str) -> Any:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].flatten(0, -2).double()
            grams[name] = grams[name] + x.T @ x if name in grams else x.T @ x

        return add

    leaders = dict.fromkeys(leaders_of(list(linears)).values())
    hooks = [linears[name].register_forward_pre_hook(adder(name)) for name in leaders]
    try:
        yield grams
    finally:
        for hook in hooks:
            hook.remove()
