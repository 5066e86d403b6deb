"""Factors in 8 bits: the last step of a run, when nothing trains them any more."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from neuronmm.compression.parts import rewrite_shards
from neuronmm.kernels import quantise
from neuronmm.models.documents import write_json
from neuronmm.models.load import weight_files
from neuronmm.models.lowrank import FACTORS


def store_int8(folder: Path) -> None:
    """Rewrite the factors of a compressed checkpoint as int8, with one float32 scale a row, and say so in config.json.

    Raises:
        UserError: the disk is full or refuses a file; the checkpoint is then untouched.
    """
    files = weight_files(folder)
    where: dict[str, str] = {}
    total = 0

    def quantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        nonlocal total
        file = files[next(iter(tensors))].name
        for name in [name for name in tensors if name.endswith(FACTORS)]:
            tensors[name], tensors[f"{name}_scale"] = quantise(tensors[name])
        where.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
        return tensors

    rewrite_shards(set(files.values()), quantised)
    if len(set(where.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_json(folder / "model.safetensors.index.json", index)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["factors"] = "int8"
    write_json(folder / "config.json", config)
