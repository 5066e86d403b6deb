"""neuronmm: compress Llama and Qwen checkpoints by SVD, run them with fused low-rank kernels, measure honestly.

``import neuronmm`` registers the checkpoint format with transformers, so that afterwards a plain
``AutoModelForCausalLM.from_pretrained(folder)`` gives the compressed model.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from neuronmm.version import VERSION as __version__

__all__ = ["__version__", "benchmark", "compress", "evaluate", "fuse", "load", "patch", "predict", "recover"]

_HOMES = {
    "benchmark": "neuronmm.measure.benchmark",
    "compress": "neuronmm.compression.pipeline",
    "evaluate": "neuronmm.measure.evaluate",
    "fuse": "neuronmm.models.patch",
    "load": "neuronmm.engine.engine",
    "patch": "neuronmm.models.patch",
    "predict": "neuronmm.measure.prediction",
    "recover": "neuronmm.compression.recover",
}


def _in_the_command() -> bool:
    """Whether this is the ``neuronmm`` command, by its script or as ``python -m neuronmm``.

    The command imports transformers itself, where it can say in one line that it was interrupted.
    """
    name = sys.argv[0] if sys.argv else ""
    return Path(name).stem == "neuronmm" or (name == "-m" and "neuronmm" in sys.orig_argv)


if not _in_the_command():
    import_module("neuronmm.models.hf").register()


def __getattr__(name: str) -> Any:
    """The public verbs are imported when first used: ``import neuronmm`` stays light."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'neuronmm' has no attribute {name!r}")
