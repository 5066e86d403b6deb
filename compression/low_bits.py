"""Round what stays dense in a finished checkpoint to few bits.

int4 is fitted to the calibration text (:mod:`~neuronmm.compression.error_feedback`): the layers are rounded in order,
each for the inputs that it has behind the embedding and the layers that are rounded already. Embedding and head become
int8. int8 is plain rounding, because feedback gains nothing there (docs/results/low_bits.md), and so is int4 without
text. A plain rounding gives what ``--weight-dtype`` gives when a model is loaded, bit by bit.
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
from neuronmm.compression.moments import check_finite, leaders_of
from neuronmm.compression.reader import Reader
from neuronmm.compression.run import Run
from neuronmm.compression.streaming import StreamedModel, advance
from neuronmm.kernels import quantise, quantise_int4
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS, LINEARS
from neuronmm.models.source import read_config
from neuronmm.models.tensors import EMBEDDING, HEAD

_STAGE = "rounding"


@torch.no_grad()
def store_low_bits(run: Run, folder: Path, rows: Tensor) -> None:
    """Rewrite the dense weights of the checkpoint in ``folder`` in the run's ``weight_dtype``, and update config.json.

    Args:
        run: the run.
        folder: a checkpoint in which the dense weights are floats.
        rows: the calibration tokens [rows, length]; there may be none.

    Raises:
        UserError: activations hold NaN or infinity, or the disk is full; the checkpoint is then untouched.
    """
    dtype, tied = run.config.weight_dtype, bool(read_config(folder).get("tie_word_embeddings"))
    fitted = _fit(run, folder, rows) if dtype == "int4" and len(rows) else {}

    def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in [name for name in tensors if name in (EMBEDDING, HEAD) or _is_dense(name)]:
            weight = tensors.pop(name)
            if name == HEAD and tied:
                continue
            if name in fitted:
                values, scales = fitted[name][name], fitted[name][f"{name}_scale"]
            else:
                values, scales = (quantise_int4 if dtype == "int4" and _is_dense(name) else quantise)(weight)[:2]
            tensors |= {name: values.contiguous(), f"{name}_scale": scales}
        return tensors

    rewrite(folder, rounded, {"format": 3, "weights": dtype})


def _is_dense(name: str) -> bool:
    """Return whether a tensor is the weight of a linear that is not factorised."""
    return name.startswith(f"{LAYERS}.") and name.endswith(tuple(f".{inside}.weight" for inside in LINEARS.values()))


def _fit(run: Run, folder: Path, rows: Tensor) -> dict[str, Reader]:
    """Round the dense linears to int4, layer by layer, and return a reader of the result for each weight's name.

    A resumed run continues after the last rounded layer.
    """
    model = StreamedModel(folder, torch.float32, run.device)
    first, state = run.workspace.latest("rounding", ["hidden"])
    if not run.workspace.complete([_layer(index) for index in range(first)], []):
        first = 0
    hidden = state["hidden"].to(run.device) if first else _embed_rounded(model, rows)
    rotary = model.streams(rows, ()).rotary
    run.progress(_STAGE, first / len(model))
    for index in range(first, len(model)):
        with model.layer(index) as layer:
            linears = {name: layer.get_submodule(name) for name in LINEARS.values()}
            dense = {name: linear for name, linear in linears.items() if isinstance(linear, nn.Linear)}
            with _input_grams(dense) as grams:
                advance(layer, hidden, rotary)
            try:
                rounded = _round(dense, grams)
            except ValueError as error:
                raise UserError(
                    f"{folder}: {LAYERS}.{index}.*: {error}; the checkpoint is damaged or unstable in float32"
                ) from None
            hidden = advance(layer, hidden, rotary)
        tensors = {f"{LAYERS}.{index}.{name}": tensor.cpu() for name, tensor in rounded.items()}
        run.workspace.save(_layer(index), tensors)
        run.workspace.save(f"rounding-{index + 1:05d}", {"hidden": hidden})
        run.workspace.drop(f"rounding-{index:05d}")
        model.reader.close()  # pages of a mapped shard count as resident
        run.progress(_STAGE, 1 / len(model))
    files = [Reader.of_file(run.workspace.folder / f"{_layer(index)}.safetensors") for index in range(len(model))]
    return {name: file for file in files for name in file.names}


def _layer(index: int) -> str:
    return f"rounded-{index:05d}"


def _embed_rounded(model: StreamedModel, rows: Tensor) -> Tensor:
    """Return the embeddings [rows, length, hidden] of tokens after rounding to int8, row by row."""
    return quantise(model.embed(rows).flatten(0, 1)).dequantise(torch.float32).view(*rows.shape, -1)


def _round(linears: dict[str, nn.Linear], grams: dict[str, Tensor]) -> dict[str, Tensor]:
    """Round ``linears`` of a layer in place and return their tensors by name inside the layer.

    ``grams`` has a Gram matrix for the first linear of those with one input.

    Raises:
        ValueError: the activations hold NaN or infinity.
    """
    tensors = dict[str, Tensor]()
    for leader, gram in grams.items():
        check_finite(gram)
        feedback = ErrorFeedback(gram)
        for name in (name for name, other in leaders_of(list(linears)).items() if other == leader):
            matrix = feedback.int4(linears[name].weight)
            tensors |= {f"{name}.weight": matrix.values, f"{name}.weight_scale": matrix.scales}
            linears[name].weight = nn.Parameter(matrix.dequantise(torch.float32), requires_grad=False)
    return tensors


@contextmanager
def _input_grams(linears: dict[str, nn.Linear]) -> Iterator[dict[str, Tensor]]:
    """Add up the Gram matrices [in, in], float64, of the inputs of ``linears`` in the ``with`` block.

    Linears with one input have one, under the name of the first of them. The products are float32. That loses
    directions with less than 1e-7 of a massive activation's energy; the damping of the feedback is far larger.
    """
    grams = dict[str, Tensor]()

    def adder(name: str) -> Any:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].flatten(0, -2)
            product = (x.T @ x).double()
            grams[name] = grams[name] + product if name in grams else product

        return add

    leaders = dict.fromkeys(leaders_of(list(linears)).values())
    hooks = [linears[name].register_forward_pre_hook(adder(name)) for name in leaders]
    try:
        yield grams
    finally:
        for hook in hooks:
            hook.remove()
