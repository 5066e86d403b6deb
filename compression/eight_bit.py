"""Factors in 8 bits: the last step of a run, when nothing trains them any more."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from safetensors.torch import load_file

from neuronmm.compression.workspace import write_tensors
from neuronmm.kernels import quantise
from neuronmm.models.load import weight_files
from neuronmm.models.portable import write_json


def store_int8(folder: Path) -> None:
    """Rewrite the factors of a compressed checkpoint as int8, with one float32 scale a row, and say so in config.json.

    Raises:
        UserError: the disk is full or refuses a file.
    """
    files = weight_files(folder)
    where: dict[str, str] = {}
    total = 0
    for file in sorted(set(files.values())):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith((".A.weight", ".B.weight"))]:
            tensors[name], tensors[f"{name}_scale"] = quantise(tensors[name])
        ready = file.with_suffix(".writing")
        write_tensors(ready, tensors)
        shutil.copymode(file, ready)
        os.replace(ready, file)
        where.update(dict.fromkeys(tensors, file.name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(set(where.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_json(folder / "model.safetensors.index.json", index)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["factors"] = "int8"
    write_json(folder / "config.json", config)
