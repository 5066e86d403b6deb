"""neuronmm: compress Llama and Qwen checkpoints by SVD, run them with fused low-rank kernels, and measure both.

``import neuronmm`` registers the checkpoint format with transformers. A plain
``AutoModelForCausalLM.from_pretrained(folder)`` then loads a compressed model.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuronmm.version import VERSION as __version__

if TYPE_CHECKING:  # for editors and type checkers; at run time __getattr__ imports them from _MODULES
    from neuronmm.compression.convert import convert
    from neuronmm.compression.pipeline import compress
    from neuronmm.compression.recover import recover
    from neuronmm.engine.engine import load
    from neuronmm.measure.benchmark import benchmark
    from neuronmm.measure.evaluate import evaluate
    from neuronmm.measure.prediction import predict
    from neuronmm.models.patch import fuse, patch

__all__ = ["__version__", "benchmark", "compress", "convert", "evaluate", "fuse", "load", "patch", "predict", "recover"]

_MODULES = {
    "benchmark": "neuronmm.measure.benchmark",
    "compress": "neuronmm.compression.pipeline",
    "convert": "neuronmm.compression.convert",
    "evaluate": "neuronmm.measure.evaluate",
    "fuse": "neuronmm.models.patch",
    "load": "neuronmm.engine.engine",
    "patch": "neuronmm.models.patch",
    "predict": "neuronmm.measure.prediction",
    "recover": "neuronmm.compression.recover",
}


def _is_command() -> bool:
    """Return whether this process is the ``neuronmm`` command, as a script or as ``python -m neuronmm``.

    The command imports transformers later, where an interruption becomes one line.
    """
    name = sys.argv[0] if sys.argv else ""
    return Path(name).stem == "neuronmm" or (name == "-m" and "neuronmm" in sys.orig_argv)


if not _is_command():
    import_module("neuronmm.models.hf").register()


def __getattr__(name: str) -> Any:
    """Import a public verb on first use, so that ``import neuronmm`` stays fast."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'neuronmm' has no attribute {name!r}")
