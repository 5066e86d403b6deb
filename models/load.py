"""Load a checkpoint folder, dense or compressed; any inconsistency is a one-line error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from neuronmm.models.documents import read_object
from neuronmm.models.errors import UserError, reading
from neuronmm.models.families import family_of
from neuronmm.models.hf import register
from neuronmm.models.model_config import ModelConfig
from neuronmm.models.source import read_config
from neuronmm.models.spec import CompressionSpec
from neuronmm.models.tensors import check_finite, check_tensors

# transformers 4.56 renamed the argument and warns about the old name.
DTYPE = "dtype" if tuple(int(n) for n in transformers.__version__.split(".")[:2]) >= (4, 56) else "torch_dtype"

SAFELY = {"local_files_only": True, "trust_remote_code": False}
"""A checkpoint is data: nothing is downloaded for it, and none of its code runs."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Short name, as the command line and the Neuron hosts spell it -> dtype."""

_PLAIN_NAME = re.compile(r"[\w .-]{1,200}\.safetensors", re.ASCII)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and notices of transformers; this tool prints its own."""
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint folder whose config.json and shards agree.

    ``settings`` is all of config.json and ``config`` the part that this project reads. ``spec`` is the
    ``quantization_config``, None for a dense checkpoint. ``files`` maps each tensor name to its shard.
    """

    settings: dict[str, Any]
    config: ModelConfig
    spec: CompressionSpec | None
    files: dict[str, Path]


def inspect(folder: Path) -> Contents:
    """Return the contents of a checkpoint folder from config.json and the shard headers, without reading a weight.

    Raises:
        UserError: unsupported architecture, corrupt shard, or a config.json that disagrees with the weights.
    """
    where = str(folder / "config.json")
    settings = read_config(folder)
    config = ModelConfig.parse(settings, where)
    block = settings.get("quantization_config")
    spec = None if "quantization_config" not in settings else CompressionSpec.parse(block, where)
    files = weight_files(folder)
    check_tensors(folder, files, config, spec)
    return Contents(settings, config, spec, files)


def weight_files(folder: Path) -> dict[str, Path]:
    """Map each tensor name to its file. As in transformers, model.safetensors takes precedence over an index.

    Raises:
        UserError: the index is malformed or names a file that is missing or outside the folder, or a file is corrupt.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    names: dict[str, Path] = {}
    if index.is_file() and not single.is_file():
        entries = read_object(index).get("weight_map")
        if not isinstance(entries, dict) or not all(isinstance(file, str) for file in entries.values()):
            raise UserError(f"{index}: not a safetensors index; download the checkpoint again")
        for name, file in entries.items():
            if not _PLAIN_NAME.fullmatch(file):
                raise UserError(f"{index}: {file!r} is not the name of a .safetensors file in the folder; fix it")
            names[name] = folder / file
    files = [single] if single.is_file() else sorted(set(names.values())) or sorted(folder.glob("*.safetensors"))
    stored: dict[str, Path] = {}
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: named in {index.name} but missing; download the checkpoint again")
        try:
            with safe_open(file, framework="pt") as tensors:
                stored.update(dict.fromkeys(tensors.keys(), file))
        except SafetensorError as error:
            raise UserError(f"{file}: corrupt shard ({error}); download or compress again") from None
    missing = [name for name in names if name not in stored]
    if missing:
        raise UserError(f"{folder}: tensor {missing[0]} is in the index but in no shard; download the checkpoint again")
    return stored


def load_pretrained(folder: Path, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Load the model of a checkpoint folder, compressed or dense, in eval mode; every weight is present and finite.

    Raises:
        UserError: unsupported architecture, corrupt shard, a config.json that disagrees with the weights, or weights
            that hold NaN or infinity.
    """
    model = map_pretrained(folder, dtype)
    check_weights(model, folder)
    model.to(device)  # type: ignore[arg-type]
    return model


def map_pretrained(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a checkpoint folder in eval mode; weights stored in ``dtype`` stay mapped from the files.

    Every weight is present, but :func:`check_weights` has to check that they are finite.

    Raises:
        UserError: unsupported architecture, corrupt shard, or a config.json that disagrees with the weights.
    """
    register()
    inspect(folder)
    kwargs: dict[str, Any] = {DTYPE: dtype, "output_loading_info": True, "use_safetensors": True, **SAFELY}
    with quiet(), reading(f"{folder}: config.json and weights disagree"):
        model_and_info: Any = AutoModelForCausalLM.from_pretrained(folder, config=load_config(folder), **kwargs)
        model, info = model_and_info
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            names = ", ".join(sorted(map(str, info[kind]))[:3])
            raise UserError(f"{folder}: config.json and weights disagree: {kind.replace('_', ' ')}: {names}")
    return model.eval()


def check_weights(model: PreTrainedModel, folder: Path) -> None:
    """Check that all weights of a model are finite.

    Raises:
        UserError: one holds NaN or infinity.
    """
    for name, parameter in model.named_parameters():
        check_finite(name, parameter, folder)


def load_config(folder: Path) -> Any:
    """Load the transformers config object of a checkpoint folder of a supported family.

    Raises:
        UserError: config.json is malformed, or this project or the installed transformers lacks its architecture.
    """
    where = folder / "config.json"
    family = family_of(read_config(folder), str(where))
    if family.model_type not in CONFIG_MAPPING:
        raise UserError(
            f"{where}: transformers {transformers.__version__} does not know {family.architecture}; install a newer one"
        )
    with quiet(), reading(f"{where}: transformers cannot read it"):
        config = AutoConfig.from_pretrained(folder, **SAFELY)
        config._attn_implementation = "sdpa"  # config.json may name a kernel on the hub, which is code
    return config


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder.

    Raises:
        UserError: the folder has no tokenizer, or the tokenizer does not work.
    """
    with quiet(), reading(f"{folder}: no usable tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **SAFELY)
        tokenizer.decode(tokenizer("a").input_ids)  # some wrong entries only fail here
    return tokenizer
