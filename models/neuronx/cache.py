"""The cache of compiled graphs: a second load of the same shape does not compile.

The key is everything that a graph depends on. Weights are inputs of a graph and not part of it, so two checkpoints of
one architecture and the same ranks share an entry.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import neuronmm.kernels
from neuronmm.kernels.cache import cache_folder, digest, write_folder
from neuronmm.models.neuronx import sdk
from neuronmm.models.neuronx.settings import Settings
from neuronmm.models.neuronx.weights import Shards


def key(shards: Shards, settings: Settings, host: str) -> str:
    """Return the name of the cache entry, a digest.

    It covers the architecture, every layer's ranks and sizes per core, the settings, all versions, the compiler's
    flags, and the code that builds the graphs: kernels, tiling, weight layout.
    """
    inputs = {
        "architecture": asdict(shards.checkpoint.architecture),
        "plans": [asdict(plan) for plan in shards.plans],
        "heads": asdict(shards.heads),
        "settings": {**asdict(settings), "dtype": settings.amp},
        "code": _code(),
        "host": host,
        "versions": sdk.versions(),
        "flags": os.environ.get("NEURON_CC_FLAGS", ""),
    }
    return digest(inputs)[:24]


def _code() -> str:
    """Return a digest of the source files that determine a graph."""
    code = hashlib.sha256()
    kernels = Path(neuronmm.kernels.__file__).parent
    for file in sorted((*kernels.glob("*.py"), *kernels.glob("nki/*.py"), *Path(__file__).parent.glob("*.py"))):
        code.update(file.read_bytes())
    return code.hexdigest()


def to_cores(model: Any, name: str) -> bool:
    """Load ``model`` onto its cores from the entry ``name``, or compile it and store the entry.

    Returns True for a hit. An entry that lacks one of the model's graphs is replaced.
    """
    folder = cache_folder() / "neuronx" / name
    if folder.is_dir():
        model.load(str(folder))
        try:
            model.to_neuron()
            return True
        except FileNotFoundError:
            shutil.rmtree(folder, ignore_errors=True)
            del model._compiled_artifacts_directory
            model.compile()
            model.setup()
    else:
        model.to_neuron()
    try:
        write_folder(folder, lambda partial: model.save(str(partial)))
    except OSError as error:  # the model is ready all the same
        print(f"neuronmm: the compiled model is not kept ({error}); NEURONMM_CACHE names its folder", file=sys.stderr)
    return False
