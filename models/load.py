"""Loading a checkpoint folder, dense or compressed, with every disagreement turned into one clear line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
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

from neuronmm.models.errors import UserError
from neuronmm.models.families import family_of
from neuronmm.models.hf import register
from neuronmm.models.source import read_config
from neuronmm.models.spec import CompressionSpec

# transformers renamed the argument in 4.56 and warns about the old name.
DTYPE = "dtype" if tuple(int(n) for n in transformers.__version__.split(".")[:2]) >= (4, 56) else "torch_dtype"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' own progress bars and notices; the tool prints its own."""
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


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it.

    Raises:
        UserError: the index is malformed or names a missing file, or a file is corrupt or cut short.
    """
    index = folder / "model.safetensors.index.json"
    names: dict[str, Path] = {}
    if index.is_file():
        try:
            names = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (json.JSONDecodeError, KeyError, AttributeError):
            raise UserError(f"{index}: not a safetensors index; download the checkpoint again") from None
    files = sorted(set(names.values())) or sorted(folder.glob("*.safetensors"))
    held: dict[str, Path] = {}
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: named in {index.name} but missing; download the checkpoint again")
        try:
            with safe_open(file, framework="pt") as tensors:
                held.update(dict.fromkeys(tensors.keys(), file))
        except SafetensorError as error:
            raise UserError(f"{file}: corrupt shard ({error}); download or compress again") from None
    missing = [name for name in names if name not in held]
    if missing:
        raise UserError(f"{folder}: tensor {missing[0]} is in the index but in no shard; download the checkpoint again")
    return held


def check_factors(folder: Path, spec: CompressionSpec) -> None:
    """Check that the shards hold the factors config.json promises, at the promised ranks and precision.

    Raises:
        UserError: a factor is missing or has another shape or type.
    """
    files = weight_files(folder)
    wrong = f"{folder}: config.json and weights disagree"

    def look(key: str) -> tuple[list[int], bool]:
        """Shape of a tensor, and whether it is int8."""
        if key not in files:
            raise UserError(f"{wrong}: {key} is missing; compress the model again")
        with safe_open(files[key], framework="pt") as tensors:
            found = tensors.get_slice(key)
            return found.get_shape(), found.get_dtype() == "I8"

    for name, rank in spec.ranks.items():
        for factor, dim in (("B", 1),) if name in spec.shared else (("A", 0), ("B", 1)):
            key = f"{name}.{factor}.weight"
            shape, int8 = look(key)
            if shape[dim] != rank:
                raise UserError(
                    f"{wrong}: {key} has shape {shape} but rank {rank} is promised; compress the model again"
                )
            if int8 != (spec.factors == "int8"):
                stored = "int8" if int8 else "not int8"
                raise UserError(
                    f"{wrong}: {key} is {stored} but factors are {spec.factors!r}; compress the model again"
                )
            if int8 and look(f"{key}_scale")[0] != shape[:1]:
                raise UserError(
                    f"{wrong}: {key}_scale does not have one scale a row of {shape}; compress the model again"
                )


def load_pretrained(folder: Path, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """The model of a checkpoint folder in eval mode, compressed or dense, every weight accounted for.

    Raises:
        UserError: unsupported architecture, corrupt shard, or a config.json that disagrees with the weights.
    """
    register()
    config = read_config(folder)
    family_of(config, str(folder / "config.json"))
    if "quantization_config" in config:
        check_factors(folder, CompressionSpec.parse(config["quantization_config"], str(folder / "config.json")))
    else:
        weight_files(folder)
    load_config(folder)  # says clearly what transformers itself would not
    kwargs: dict[str, Any] = {DTYPE: dtype, "output_loading_info": True, "local_files_only": True}
    with quiet():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(folder, **kwargs)
        except (RuntimeError, ValueError, TypeError) as error:  # TypeError: 4.x builds the model from unchecked values
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{folder}: config.json and weights disagree ({first})") from None
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            some = ", ".join(sorted(map(str, info[what]))[:3])
            raise UserError(f"{folder}: config.json and weights disagree: {what.replace('_', ' ')}: {some}")
    return model.to(device).eval()


def load_config(folder: Path) -> Any:
    """transformers' config object of a checkpoint folder of a supported family.

    Raises:
        UserError: config.json is malformed, or its architecture is not supported here or by this transformers.
    """
    where = folder / "config.json"
    family = family_of(read_config(folder), str(where))
    if family.model_type not in CONFIG_MAPPING:
        raise UserError(
            f"{where}: transformers {transformers.__version__} does not know {family.architecture}; install a newer one"
        )
    with quiet():
        try:
            return AutoConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # which one, for a malformed entry, differs from version to version
            raise UserError(f"{where}: transformers cannot read it ({' '.join(str(error).split())})") from None


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder.

    Raises:
        UserError: the folder holds none.
    """
    with quiet():
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(f"{folder}: no usable tokenizer there ({first})") from None
