"""Load a checkpoint folder, dense or compressed; any inconsistency is a one-line error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from neuronmm.models.contents import inspect
from neuronmm.models.documents import read_object
from neuronmm.models.errors import UserError, reading
from neuronmm.models.families import family_of
from neuronmm.models.garbage import not_collected
from neuronmm.models.hf import register
from neuronmm.models.model_config import MOST_POSITIONS
from neuronmm.models.source import read_config
from neuronmm.models.tensors import check_finite

# transformers 4.56 renamed the argument and warns about the old name.
DTYPE = "dtype" if tuple(int(n) for n in transformers.__version__.split(".")[:2]) >= (4, 56) else "torch_dtype"

_YARN_BY_FACTOR = int(transformers.__version__.split(".")[0]) >= 5

SAFELY = {"local_files_only": True, "trust_remote_code": False}
"""A checkpoint is data: nothing is downloaded for it, and none of its code runs."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Short name, as the command line and the Neuron hosts spell it -> dtype."""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and messages of transformers; this tool prints its own.

    Those of errors, too: transformers raises the error besides, and it reaches the user in one line.
    """
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


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
    register()
    with quiet(), reading(f"{where}: transformers cannot read it"):
        config = AutoConfig.from_pretrained(folder, **SAFELY)
        config._attn_implementation = "sdpa"  # config.json may name a kernel on the hub, which is code
    return config


def positions_of(config: Any) -> int:
    """Return how many positions a model reads.

    With yarn that is its factor times the original number: Qwen's recipe for long texts leaves
    ``max_position_embeddings`` at the original one. transformers before 5 computes the factor from both instead.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    positions: int = config.max_position_embeddings
    if rope.get("rope_type") != "yarn" or not _YARN_BY_FACTOR:
        return positions
    original = rope.get("original_max_position_embeddings") or positions
    return max(positions, int(min(original * rope["factor"], MOST_POSITIONS)))


def end_tokens(folder: Path, config: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that end a sequence: the tokenizer's, and the generation config's or else the model config's.

    Fine-tuning often changes one of them only, and leaves that of the base model in the other.

    Raises:
        UserError: generation_config.json is malformed.
    """
    path = folder / "generation_config.json"
    eos: Any = read_object(path).get("eos_token_id") if path.is_file() else None
    if not all(type(token) is int for token in _as_list(eos)):
        raise UserError(f"{path}: eos_token_id has to be a token id or a list of them; fix it or remove the file")
    return frozenset([*(_as_list(eos) or _as_list(config.eos_token_id)), *_as_list(tokenizer.eos_token_id)])


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder.

    Raises:
        UserError: the folder has no tokenizer, or the tokenizer does not work.
    """
    with quiet(), not_collected(), reading(f"{folder}: no usable tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **SAFELY)
        tokenizer.decode(tokenizer("a").input_ids)  # some wrong entries only fail here
    return tokenizer
