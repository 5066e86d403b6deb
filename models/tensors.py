"""The tensors that config.json promises, and the check that the shards contain exactly those.

The check reads only the headers of the shards. It runs before anything is built, so that a false config.json cannot
cost more time and memory than the weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from neuronmm.kernels import Form
from neuronmm.kernels.int4_layout import int4_shape
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS, LINEARS
from neuronmm.models.model_config import ModelConfig
from neuronmm.models.spec import CompressionSpec, bias_name

if TYPE_CHECKING:  # torch is imported where a value is read; headers are read without it
    from torch import Tensor

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
IGNORED = "rotary_emb.inv_freq"
"""Name suffix of tensors that old checkpoints contain and nothing reads."""

FLOATS = ("F64", "F32", "BF16", "F16")
"""The dtypes that a weight may be stored in, as safetensors names them."""
FEW_BITS = {"int8": "I8", "int4": "U8", "fp8": "F8_E4M3"}
"""The dtype of the values of a matrix of few bits, by the precision that config.json gives it."""


@dataclass(frozen=True)
class Promise:
    """What config.json promises about one tensor. ``dtypes`` are safetensors' names."""

    shape: tuple[int, ...]
    required: bool = True
    dtypes: tuple[str, ...] = FLOATS


def promised(config: ModelConfig, spec: CompressionSpec | None) -> Iterator[tuple[str, Promise]]:
    """Yield the name of every required or optional tensor of a checkpoint, with its promise."""
    hidden, head, shapes = config.hidden_size, config.head, config.linears
    table, low = (config.vocab_size, hidden), spec is not None and spec.weights != "model"
    yield from _matrix(EMBEDDING, table, "int8" if low else "model")
    yield NORM, Promise((hidden,))
    if not low:
        yield HEAD, Promise(table, required=not config.tie_word_embeddings)
    elif not config.tie_word_embeddings:
        yield from _matrix(HEAD, table, "int8")
    for index in range(config.num_hidden_layers):
        layer = f"{LAYERS}.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", Promise((hidden,))
        for norm in ("q_norm", "k_norm") if config.model_type == "qwen3" else ():
            yield f"{layer}.self_attn.{norm}.weight", Promise((head,))
        for short, inside in LINEARS.items():
            yield from linear_tensors(f"{layer}.{inside}", *shapes[short], spec, biased=config.has_bias(short))


def linear_tensors(
    name: str, out_features: int, in_features: int, spec: CompressionSpec | None, *, biased: bool | None = None
) -> Iterator[tuple[str, Promise]]:
    """Yield the full names of the tensors of one linear, dense or factorised, with their promises.

    ``biased`` says whether it has a bias; None: it may have one.
    """
    bias = Promise((out_features,), required=biased is True)
    if spec is None or name not in spec.ranks:
        yield from _matrix(f"{name}.weight", (out_features, in_features), "model" if spec is None else spec.weights)
        if biased is not False:
            yield f"{name}.bias", bias
        return
    rank, form = spec.ranks[name], spec.form_of(name)
    spec.check_first_pivot(name, out_features)
    shapes = {
        "A": (rank, in_features - rank if form is Form.COLUMNS else in_features),
        "B": (out_features - rank if form is Form.ROWS else out_features, rank),
    }
    if name in spec.shared:
        del shapes["A"]
    for factor, shape in shapes.items():
        yield from _matrix(f"{name}.{factor}.weight", shape, spec.factors)
    if name in spec.forms and spec.forms[name].indexed:
        yield f"{name}.pivots", Promise((rank,), dtypes=("I32",))
    if biased is not False:
        yield bias_name(name, form), bias


def _matrix(name: str, shape: tuple[int, int], precision: str) -> Iterator[tuple[str, Promise]]:
    """Yield the tensors of the matrix ``name`` of ``shape`` [out, in], with their promises."""
    if precision == "model":
        yield name, Promise(shape)
        return
    packed = int4_shape(*shape) if precision == "int4" else shape
    yield name, Promise(packed, dtypes=(FEW_BITS[precision],))
    yield f"{name}_scale", Promise(shape[:1], dtypes=("F32",))


def parameter_shapes(config: ModelConfig, spec: CompressionSpec | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the promised tensors by name; a head that is stored and tied is the embedding."""
    shapes = {name: promise.shape for name, promise in promised(config, spec)}
    if config.tie_word_embeddings:
        shapes.pop(HEAD, None)
    return shapes


def check_tensors(folder: Path, files: dict[str, Path], config: ModelConfig, spec: CompressionSpec | None) -> None:
    """Check that the shards hold the tensors that config.json promises and no others.

    Args:
        folder: the checkpoint, for messages.
        files: tensor name -> its shard.
        config: the content of config.json.
        spec: the compression; None for a dense checkpoint.

    Raises:
        UserError: a tensor is missing or unknown, or has another shape or dtype.
    """
    wrong = f"{folder}: config.json and weights disagree"
    again = "compress the model again" if spec is not None else "download the checkpoint again"
    stored = dict(headers(files))
    for name, promise in promised(config, spec):
        if name in stored:
            shape, dtype = stored.pop(name)
            if shape != promise.shape:
                raise UserError(f"{wrong}: {name} has shape {list(shape)}, not {list(promise.shape)}; {again}")
            if dtype not in promise.dtypes:
                raise UserError(f"{wrong}: {name} is stored as {dtype}, not as {' or '.join(promise.dtypes)}; {again}")
        elif promise.required:
            raise UserError(f"{wrong}: {name} is in no shard; {again}")
    unknown = [name for name in stored if not name.endswith(IGNORED)]
    unknown += [name for name in (spec.ranks if spec is not None else ()) if f"{name}.B.weight" not in files]
    if unknown:
        raise UserError(f"{wrong}: {unknown[0]} belongs to no part of the model; {again}")


def headers(files: dict[str, Path]) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """Yield the name, shape and dtype of every tensor; the dtype is safetensors' name."""
    for file in sorted(set(files.values())):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                yield name, (tuple(part.get_shape()), part.get_dtype())


def check_finite(name: str, tensor: Tensor, where: Path) -> None:
    """Check that a weight of any shape is finite, and one in fp8 also that every NeuronCore can read its numbers.

    Raises:
        UserError: it holds NaN or infinity, or an fp8 number above the largest of Trainium's e4m3.
    """
    import torch

    from neuronmm.kernels.fp8 import LARGEST

    fp8 = tensor.dtype is torch.float8_e4m3fn
    ends = torch.stack(torch.aminmax(tensor.float() if fp8 else tensor)) if tensor.is_floating_point() else None
    if fp8 and ends is not None and ends.abs().max() > LARGEST:
        raise UserError(
            f"{where}: {name} holds fp8 numbers above {LARGEST:.0f}, which Trainium reads as infinity or NaN; compress "
            "the model again"
        )
    if ends is not None and not torch.isfinite(ends).all():
        raise UserError(
            f"{where}: {name} holds NaN or infinity; the checkpoint is damaged; download or compress it again"
        )


def check_pivots(name: str, pivots: Tensor, outputs: int, where: Path | str) -> None:
    """Refuse the ``pivots`` [r] of a linear unless they increase strictly and are numbers of its ``outputs``.

    Raises:
        UserError: they do not.
    """
    numbers = pivots.long()
    if numbers[0] < 0 or numbers[-1] >= outputs or not (numbers.diff() > 0).all():
        raise UserError(
            f"{where}: {name} has to hold increasing numbers from 0 to {outputs - 1}; the checkpoint is damaged, "
            "download or make it again"
        )


def check_tokens(ids: Tensor, vocabulary: int) -> None:
    """Check that the model has an embedding for every token id in ``ids``, of any shape.

    Raises:
        UserError: an id lies outside the vocabulary.
    """
    highest = int(ids.max()) if ids.numel() else 0
    if highest >= vocabulary:
        raise UserError(
            f"the tokenizer gives token {highest}, but the model's vocabulary has {vocabulary} tokens; the two do not "
            "belong together: download the checkpoint again"
        )
