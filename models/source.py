"""Where a model comes from: a Hugging Face folder, a GGUF file or a hub id, all made into one thing, a folder.

Only safetensors weights are accepted: a pickle can run code. A GGUF file is unpacked once into a cache folder
(``$NEURONMM_CACHE``, else ``~/.cache/neuronmm``) as an ordinary bf16 checkpoint, tokenizer included.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from neuronmm.kernels.cache import cache_folder, write_folder
from neuronmm.models.errors import UserError
from neuronmm.models.portable import make_portable

_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_GGUF_MAGIC = b"GGUF"
_CACHE_FORMAT = 1


def resolve(model: str | Path) -> Path:
    """The folder that holds ``model``'s config.json, safetensors and tokenizer.

    Args:
        model: a folder, a ``.gguf`` file, or a hub id such as ``meta-llama/Llama-3.2-1B`` (needs a connection).

    Raises:
        UserError: there is no such model, or its weights are not safetensors.
    """
    path = expanded(model)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != _GGUF_MAGIC:
                raise UserError(f"{path}: neither a model folder nor a GGUF file")
        return _unpack_gguf(path.resolve())
    folder = path if path.is_dir() else _download(str(model))
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json there; give the folder of a Hugging Face checkpoint")
    if not list(folder.glob("*.safetensors")):
        pickles = [file.name for file in folder.glob("*.bin")]
        hint = f"only {pickles[0]}, a pickle; convert it to safetensors first" if pickles else "the weights are missing"
        raise UserError(f"{folder}: no .safetensors file there ({hint})")
    return folder


def expanded(path: str | Path) -> Path:
    """``path`` with the home folder for a leading ``~``.

    Raises:
        UserError: it names a user whom this machine does not have.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: this machine has no such user; write ./~... for a folder of that name") from None


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``folder``'s config.json.

    Raises:
        UserError: the file is not valid JSON.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: not a JSON object")
    return config


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UserError(f"{model}: no such file or folder")
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except HFValidationError:
        raise UserError(f"{model}: no such file or folder, and not a hub id") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{model}: no such folder, and the hub did not give it ({first})") from None


def _unpack_gguf(file: Path) -> Path:
    """Dequantise ``file`` into a cached bf16 folder; the folder appears only when it is complete."""
    stat = file.stat()
    key = hashlib.sha256(f"{_CACHE_FORMAT}:{file}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder() / f"{file.stem}-{key}"
    if not folder.is_dir():
        write_folder(folder, lambda partial: _write_gguf(file, partial))
    return folder


def _write_gguf(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from neuronmm.models.load import DTYPE, quiet

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        with quiet():
            config = AutoConfig.from_pretrained(**where)
            loaded = AutoModelForCausalLM.from_pretrained(**where, **{DTYPE: torch.float32})
            tokenizer = AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError, LookupError, NotImplementedError) as error:
        raise UserError(f"{file}: transformers cannot read this GGUF file ({str(error).splitlines()[0]})") from None
    # transformers marks the model as GGUF-quantised and then refuses to save it: rebuild it from a clean config.
    values = {k: v for k, v in config.to_dict().items() if k not in ("quantization_config", "dtype", "torch_dtype")}
    clean = type(config).from_dict({**values, "rms_norm_eps": float(f"{config.rms_norm_eps:.6g}")})
    clean.architectures = [type(loaded).__name__]
    model = type(loaded)(clean)
    model.load_state_dict(loaded.state_dict())
    with quiet():
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    make_portable(folder)
