"""neuronmm: compress Llama and Qwen checkpoints by SVD, run them with fused low-rank kernels, measure honestly.

``import neuronmm`` registers the checkpoint format with transformers, so that afterwards a plain
``AutoModelForCausalLM.from_pretrained(folder)`` gives the compressed model.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
if not (_HERE / "models").is_dir():  # a checkout: the sub-packages lie beside this folder
    __path__.append(str(_HERE.parent))

from neuronmm.models.hf import register as _register  # noqa: E402  (found beside this folder only now)
from neuronmm.models.version import VERSION as __version__  # noqa: E402

__all__ = ["__version__", "benchmark", "compress", "evaluate", "fuse", "load", "patch", "predict", "recover"]

_HOMES = {
    "benchmark": "neuronmm.engine.benchmark",
    "compress": "neuronmm.compression.pipeline",
    "evaluate": "neuronmm.engine.evaluate",
    "fuse": "neuronmm.models.patch",
    "load": "neuronmm.engine.engine",
    "patch": "neuronmm.models.patch",
    "predict": "neuronmm.prediction",
    "recover": "neuronmm.compression.recover",
}

_register()


def __getattr__(name: str) -> Any:
    """The public verbs are imported when first used: ``import neuronmm`` stays light."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'neuronmm' has no attribute {name!r}")
