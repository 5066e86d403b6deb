"""What a model consists of, from config.json and the headers of its weights: sizes, parameters, forms and ranks.

Neither torch nor a weight is loaded, so the answer takes less than a second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from neuronmm.kernels import Form
from neuronmm.measure.worth import Worth, worths
from neuronmm.models.contents import inspect as read_contents
from neuronmm.models.families import LAYERS, LINEARS
from neuronmm.models.model_config import ModelConfig
from neuronmm.models.source import expanded, is_gguf, resolve
from neuronmm.models.spec import CompressionSpec
from neuronmm.models.tensors import EMBEDDING, HEAD, NORM, headers, parameter_shapes, promised

KINDS = ("embedding", "attention", "MLP", "norms", "head")
_NOT_WEIGHTS = (".pivots", "_scale")
_BITS = {"F64": 64, "F32": 32, "BF16": 16, "F16": 16, "I32": 32, "I8": 8, "U8": 8, "F8_E4M3": 8}


class Stored(NamedTuple):
    """One tensor: its shape, its dtype as the file names it, and its size in bytes."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class FactorisedLinear:
    """One linear of a compressed model. ``form``: ``two`` or ``pivoted``; ``shares_a_of``: the linear whose A it uses.

    ``dense_parameters`` are those of the weight that the factors replace. Biases do not count.
    """

    layer: int
    linear: str
    form: str
    rank: int
    shares_a_of: str | None
    parameters: int
    dense_parameters: int


@dataclass(frozen=True)
class Inspection:
    """The result of ``neuronmm inspect``.

    ``parameters`` are by kind, and zero for a head that is the embedding; ``bytes`` are by dtype. ``linears`` are the
    factorised ones, ``worth`` is for a dense model.
    """

    model: str
    config: ModelConfig
    parameters: dict[str, int]
    bytes: dict[str, int]
    spec: CompressionSpec | None
    linears: list[FactorisedLinear]
    worth: list[Worth]

    @property
    def dense_parameters(self) -> int:
        """The parameters of the model before compression."""
        removed = sum(linear.dense_parameters - linear.parameters for linear in self.linears)
        return sum(self.parameters.values()) + removed

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "kind": "counted",
            "what": "inspection",
            "model": self.model,
            "architecture": self.config.model_type,
            "layers": self.config.num_hidden_layers,
            "hidden_size": self.config.hidden_size,
            "intermediate_size": self.config.intermediate_size,
            "attention_heads": self.config.num_attention_heads,
            "kv_heads": self.config.kv_heads,
            "head_size": self.config.head,
            "vocabulary": self.config.vocab_size,
            "parameters": {"total": sum(self.parameters.values()), **self.parameters},
            "dense_parameters": self.dense_parameters,
            "bytes": {"total": sum(self.bytes.values()), **self.bytes},
            "compression": self.spec and self.spec.model_dump(exclude={"ranks", "shared", "forms"}),
            "linears": [asdict(linear) for linear in self.linears],
            "worth": [asdict(worth) for worth in self.worth],
        }


def inspect(model: str | Path) -> Inspection:
    """Return what a model consists of.

    Args:
        model: a Hugging Face folder, dense or compressed, a GGUF file, or a hub id, which is downloaded.

    Raises:
        UserError: there is no such model, its family is not supported, or its config.json and headers disagree.
    """
    path = expanded(model)
    if is_gguf(path):
        config, tensors = _of_gguf(path)
        return _inspection(model, config, None, tensors, linear_bytes=2)  # it is unpacked to bf16
    contents = read_contents(resolve(model))
    tensors = {
        name: Stored(shape, dtype, math.prod(shape) * _BITS.get(dtype, 0) // 8)
        for name, (shape, dtype) in headers(contents.files)
    }
    first = tensors.get(f"{LAYERS}.0.{LINEARS['down']}.weight")
    linear_bytes = _BITS[first.dtype] // 8 if first is not None else 0
    return _inspection(model, contents.config, contents.spec, tensors, linear_bytes)


def _of_gguf(file: Path) -> tuple[ModelConfig, dict[str, Stored]]:
    """Return the sizes and the tensors of a GGUF file, under the names of transformers."""
    from neuronmm.models.gguf_header import read_header
    from neuronmm.models.gguf_names import gguf_names, sizes_of

    header = read_header(file)
    config = sizes_of(file, header)
    tensors = {}
    for name, gguf_name in gguf_names(file, header.tensors, config).items():
        stored = header.tensors[gguf_name]
        tensors[name] = Stored(stored.shape, stored.type.name, math.prod(stored.shape[:-1]) * stored.row_bytes)
    return config, tensors


def _inspection(
    model: str | Path,
    config: ModelConfig,
    spec: CompressionSpec | None,
    tensors: Mapping[str, Stored],
    linear_bytes: int,
) -> Inspection:
    # int4 packs two elements into a byte; their shapes are those of floats.
    floats = None if spec is None else spec.model_copy(update={"weights": "model", "factors": "model"})
    promises = parameter_shapes(config, floats)
    parameters: dict[str, int] = {kind: 0 for kind in KINDS}
    sizes = Counter[str]()
    for name, tensor in tensors.items():
        sizes[tensor.dtype] += tensor.bytes
        if name in promises and not name.endswith(_NOT_WEIGHTS):
            parameters[_kind(name)] += math.prod(promises[name])
    shapes = {name.removesuffix(".weight"): promise.shape for name, promise in promised(config, None)}
    return Inspection(
        model=str(model),
        config=config,
        parameters=parameters,
        bytes=dict(sizes.most_common()),
        spec=spec,
        linears=[] if spec is None else list(_linears(spec, shapes, promises)),
        worth=worths(shapes, config.num_hidden_layers, sum(parameters.values()), linear_bytes) if spec is None else [],
    )


def _kind(name: str) -> str:
    """Return the kind, among :data:`KINDS`, of the tensor ``name``."""
    if name == EMBEDDING:
        return "embedding"
    if name == HEAD:
        return "head"
    if name == NORM or "norm" in name.rsplit(".", 2)[-2]:
        return "norms"
    return "MLP" if ".mlp." in name else "attention"


def _linears(
    spec: CompressionSpec, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]
) -> Iterable[FactorisedLinear]:
    """Yield the factorised linears, in the order of the layers. ``shapes`` are those of the dense weights.

    ``stored`` are those of all tensors, as floats.
    """
    names = [name for name in shapes if name in spec.ranks]
    for name in names:
        layer, _, inside = name.removeprefix(f"{LAYERS}.").partition(".")
        short = next(short for short, path in LINEARS.items() if path == inside)
        leader = spec.shared.get(name)
        factors = [stored[f"{name}.{factor}.weight"] for factor in ("A", "B") if factor == "B" or leader is None]
        yield FactorisedLinear(
            layer=int(layer),
            linear=short,
            form="two" if spec.form_of(leader or name) is Form.TWO else "pivoted",
            rank=spec.ranks[name],
            shares_a_of=None if leader is None else leader.rpartition(".")[2].removesuffix("_proj"),
            parameters=sum(map(math.prod, factors)),
            dense_parameters=math.prod(shapes[name]),
        )
