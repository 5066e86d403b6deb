"""Unpack a GGUF file into an ordinary bf16 checkpoint, one tensor at a time.

transformers reads the configuration and the tokenizer. The weights are dequantised in pieces, straight into shards, so
that memory does not grow with the model. transformers itself would hold all weights in float32.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import dequantize
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from neuronmm.models.documents import write_json
from neuronmm.models.errors import UserError, reading
from neuronmm.models.families import family_of
from neuronmm.models.gguf_header import StoredTensor, read_header
from neuronmm.models.gguf_names import ROPE_FACTORS, biases, gguf_names, sizes_of
from neuronmm.models.gguf_rope import with_scaling
from neuronmm.models.gguf_tokenizer import end_tokens, read_tokenizer
from neuronmm.models.load import DTYPE, SAFELY, quiet
from neuronmm.models.model_config import ModelConfig
from neuronmm.models.portable import make_portable
from neuronmm.models.progress import Progress, no_progress
from neuronmm.models.tensors import check_finite

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_SHARD = 1 << 30  # bytes of a shard, and so of the weights in memory; a larger tensor has a shard of its own
_ELSEWHERE = "free some disk space, or name another folder in NEURONMM_CACHE"
_PIECE = 1 << 22  # weights that a thread dequantises at once; the intermediate results take 40 bytes each


def unpack(file: Path, folder: Path, progress: Progress = no_progress) -> None:
    """Write the model in ``file`` to ``folder`` as an ordinary bf16 checkpoint, tokenizer included.

    Raises:
        UserError: the file is damaged, the model is not supported, or weights are NaN or infinite.
    """
    header = read_header(file)
    unreadable = f"{file}: transformers cannot read this GGUF file"
    with quiet(), reading(unreadable):
        config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name, **SAFELY)
    sizes_of(file, header)  # refuses what the header says and transformers does not read
    config.update(header.sizes | biases(header))  # transformers reads neither the size of a head nor biases
    sizes = ModelConfig.parse(config.to_dict(), str(file))
    source = _Weights(file, header.tensors, sizes)
    with quiet(), reading(unreadable):
        tokenizer = read_tokenizer(file, config.model_type, header.tokenizer, **SAFELY)
        tokenizer.save_pretrained(folder)
    clean = _clean(config, header.rope, source.rope_factors(), str(file))
    with quiet():
        clean.save_pretrained(folder)
        generation = GenerationConfig.from_model_config(clean)
        generation.eos_token_id = end_tokens(tokenizer, header.tokenizer, sizes.vocab_size) or None
        generation.save_pretrained(folder)
    source.write(folder, progress)
    make_portable(folder)


def _clean(config: Any, rope: Mapping[str, str | float], rope_factors: Tensor | None, where: str) -> PretrainedConfig:
    """Return the configuration of the unpacked model: bf16, not quantised, and with the RoPE scaling of the file.

    Raises:
        UserError: the RoPE scaling is of an unknown type.
    """
    values = {k: v for k, v in config.to_dict().items() if k not in ("quantization_config", "dtype", "torch_dtype")}
    values |= {"rms_norm_eps": float(f"{config.rms_norm_eps:.6g}"), DTYPE: "bfloat16"}
    values["architectures"] = [family_of(values, where).architecture]
    return with_scaling(type(config), values, rope, rope_factors, where)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a shard that the same users may read as other files.

    Raises:
        UserError: the disk is full or refuses the file.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets nobody but the owner read the file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path.parent.parent}: cannot be written ({error}); {_ELSEWHERE}") from None


class _Weights:
    """The weights of a GGUF file, under the names of transformers.

    Raises:
        UserError: the file lacks a tensor, or has one of another shape or one that belongs to no part of the model.
    """

    def __init__(self, file: Path, stored: dict[str, StoredTensor], config: ModelConfig) -> None:
        self._file, self._stored, self._config = file, stored, config
        self._content: Bytes = np.memmap(file, np.uint8, "r")
        self._gguf_names = gguf_names(file, stored, config)

    def rope_factors(self) -> Tensor | None:
        """Return the numbers by which RoPE's frequencies are divided, float32 [head / 2]; None if there are none."""
        if ROPE_FACTORS not in self._stored:
            return None
        factors = self._rows(ROPE_FACTORS, 0, 1).flatten()
        check_finite(ROPE_FACTORS, factors, self._file)
        return factors

    def write(self, folder: Path, progress: Progress) -> None:
        """Dequantise all weights to bf16, and write them to ``folder`` in shards.

        Raises:
            UserError: a weight is NaN or infinite, its type is unknown to the package ``gguf``, or the disk is full.
        """
        empty = {
            name: torch.empty(self._stored[gguf_name].shape, dtype=torch.bfloat16, device="meta")
            for name, gguf_name in self._gguf_names.items()
        }
        split = split_torch_state_dict_into_shards(empty, max_shard_size=_SHARD)
        total = sum(tensor.numel() for tensor in empty.values())
        needed, free = total * torch.bfloat16.itemsize, shutil.disk_usage(folder).free
        if free < needed:
            raise UserError(
                f"{folder.parent}: {free / 1e9:.1f} GB of disk free, {needed / 1e9:.1f} GB needed to unpack the GGUF "
                f"file; {_ELSEWHERE}"
            )
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for shard, names in split.filename_to_tensors.items():
                tensors = {}
                for name in names:
                    tensors[name] = self._bf16(name, threads)
                    progress("dequantising", empty[name].numel() / total)
                _save(tensors, folder / shard)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            write_json(folder / "model.safetensors.index.json", index)

    def _bf16(self, name: str, threads: ThreadPoolExecutor) -> Tensor:
        gguf_name = self._gguf_names[name]
        stored = self._stored[gguf_name]
        rows, width = math.prod(stored.shape[:-1]), stored.shape[-1]
        result = torch.empty(rows, width, dtype=torch.bfloat16)
        step = max(1, _PIECE // width)

        def fill(start: int) -> None:
            result[start : start + step] = self._rows(gguf_name, start, min(step, rows - start))

        for _ in threads.map(fill, range(0, rows, step)):
            pass
        check_finite(name, result, self._file)
        tensor = result.view(stored.shape)
        return self._in_halves(name, tensor) if self._config.model_type == "llama" else tensor

    def _rows(self, gguf_name: str, start: int, rows: int) -> Tensor:
        """Return ``rows`` rows of a tensor from row ``start`` on, float32 [rows, width]."""
        stored = self._stored[gguf_name]
        begin = stored.offset + start * stored.row_bytes
        data = self._content[begin : begin + rows * stored.row_bytes].reshape(rows, stored.row_bytes)
        with (
            reading(f"{self._file}: {gguf_name} of type {stored.type.name} cannot be dequantised"),
            np.errstate(all="ignore"),  # a damaged scale overflows; the result is checked
        ):
            values = dequantize(data, stored.type)
        return torch.from_numpy(np.array(values, np.float32))

    def _in_halves(self, name: str, tensor: Tensor) -> Tensor:
        """Return the rows of a query or key projection in the order of transformers.

        RoPE turns pairs of a head's rows. A GGUF file of a Llama stores the two rows of a pair beside each other,
        transformers half a head apart.
        """
        if ".q_proj." not in name and ".k_proj." not in name:
            return tensor
        half = self._config.head // 2
        return tensor.unflatten(0, (-1, half, 2)).transpose(1, 2).flatten(0, 2).contiguous()
