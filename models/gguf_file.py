"""Unpack a GGUF file with transformers, after a check of its header.

The reader that transformers uses trusts the header: an array declared with 2**60 numbers in a file of one kilobyte
keeps it busy forever. The check walks the header first and compares the declared sizes with the size of the file.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from neuronmm.models.errors import UserError, reading
from neuronmm.models.load import DTYPE, SAFELY, quiet
from neuronmm.models.model_config import ModelConfig
from neuronmm.models.portable import make_portable
from neuronmm.models.tensors import check_finite, promised

_VERSIONS = (2, 3)
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""GGUF type code -> bytes of a number."""
_STRING, _ARRAY = 8, 9
_MAX_VALUES = 1 << 22  # in arrays; the largest vocabularies need a quarter of that, and the reader takes 400 bytes each
_MAX_DIMENSIONS = 4
_MAX_WEIGHTS_PER_BYTE = 8  # the densest quantisation packs five


def unpack(file: Path, folder: Path) -> None:
    """Write the model in ``file`` to ``folder`` as an ordinary bf16 checkpoint, tokenizer included.

    Raises:
        UserError: the file is damaged, the model is not supported, or weights are NaN or infinite.
    """
    stored = _count_weights(file)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, **SAFELY}
    unreadable = f"{file}: transformers cannot read this GGUF file"
    with quiet(), reading(unreadable):
        config = AutoConfig.from_pretrained(**where)
    sizes = ModelConfig.parse(config.to_dict(), str(file))
    needed = sum(math.prod(promise.shape) for _, promise in promised(sizes, None) if promise.required)
    if needed > stored:
        raise UserError(f"{file}: its sizes need {needed} weights, but it holds {stored}; download it again")
    with quiet(), reading(unreadable):
        options: dict[str, Any] = {DTYPE: torch.float32, "output_loading_info": True, "attn_implementation": "sdpa"}
        model_and_info: Any = AutoModelForCausalLM.from_pretrained(**where, **options)
        loaded, info = model_and_info
        tokenizer = AutoTokenizer.from_pretrained(**where)
    if info["missing_keys"]:
        raise UserError(f"{file}: {min(info['missing_keys'])} is not in this GGUF file; download it again")
    for name, tensor in loaded.state_dict().items():
        check_finite(name, tensor, file)
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


def _count_weights(file: Path) -> int:
    """Return the number of weights that the file's header lists.

    Raises:
        UserError: the header is truncated, or lists more weights than the file can hold.
    """
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            return _Header(content).weights()
        except (struct.error, ValueError) as error:
            raise UserError(f"{file}: damaged GGUF file ({error}); download it again") from None


class _Header:
    """Walks through a GGUF header once, storing only its position.

    Raises:
        ValueError: the header contains an impossible value.
        struct.error: the header continues past the end of the file.
    """

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at, self._values = content, 4, 0  # 4: the magic

    def weights(self) -> int:
        """Return the number of weights of all tensors."""
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is none of {_VERSIONS}")
        tensors, entries = self._number("Q"), self._number("Q")
        for _ in range(entries):
            self._skip_string()
            self._skip_value(self._number("I"))
        weights = 0
        for _ in range(tensors):
            self._skip_string()
            dimensions = self._number("I")
            if dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions")
            weights += math.prod(self._number("Q") for _ in range(dimensions))
            self._number("I")  # the type
            self._number("Q")  # the offset of the data
        if weights > _MAX_WEIGHTS_PER_BYTE * len(self._content):
            raise ValueError(f"{weights} weights are more than its {len(self._content)} bytes hold")
        return weights

    def _number(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self._content, self._at)
        self._at += struct.calcsize(code)
        return int(value)

    def _skip(self, size: int) -> None:
        if size > len(self._content) - self._at:
            raise ValueError(f"its {len(self._content)} bytes end before an entry of the header does")
        self._at += size

    def _skip_string(self) -> None:
        self._skip(self._number("Q"))

    def _skip_value(self, kind: int) -> None:
        if kind in _SIZES:
            self._skip(_SIZES[kind])
        elif kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            self._values += count
            if self._values > _MAX_VALUES or inner == _ARRAY:
                raise ValueError(f"an array of {count} values of type {inner}")
            for _ in range(count):
                self._skip_value(inner)
        else:
            raise ValueError(f"a value of type {kind}")
