"""The plugin for vllm-neuron (1.0 and later): its Llama and Qwen3 with low-rank MLPs.

vllm-neuron's worker registers the classes that ``vllm_neuron.model.registry.get_models`` returns, and builds a model
with ``from_configs``. :func:`register` puts subclasses into that module. They differ for compressed checkpoints only.

**Not run in vllm-neuron** (:mod:`neuronmm.models.neuronx.vllm_modules`).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from neuronmm.models.neuronx import vllm_modules
from neuronmm.models.spec import QUANT_METHOD

CLASSES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Classes of vllm-neuron whose models :mod:`neuronmm.models.neuronx.vllm_modules` knows; a release may lack one."""


def present() -> bool:
    """Return whether vllm-neuron is installed, in a version that has models of its own. Nothing is imported."""
    try:
        spec = find_spec("vllm_neuron")
    except ValueError:  # a stand-in without a spec
        return False
    places = (spec and spec.submodule_search_locations) or ()
    return any((Path(place) / "model" / "registry.py").is_file() for place in places)


def register() -> None:
    """Let vllm-neuron serve compressed checkpoints; repeated calls are harmless."""
    from vllm_neuron.model import registry
    from vllm_neuron.vllm.platform import NeuronPlatform

    if QUANT_METHOD not in NeuronPlatform.supported_quantization:
        NeuronPlatform.supported_quantization.append(QUANT_METHOD)
    for name in CLASSES:
        base = getattr(registry, name, None)
        if base is not None and not getattr(base, "serves_low_rank", False):
            setattr(registry, name, low_rank(base))


def low_rank(base: Any) -> Any:
    """Return a class of vllm-neuron that also builds models of compressed checkpoints."""

    class LowRank(base):  # type: ignore[misc]
        serves_low_rank = True

        @classmethod
        def from_configs(cls, hf_config: Any, *args: Any, **options: Any) -> Any:
            compression = getattr(hf_config, "quantization_config", None)
            if not isinstance(compression, dict) or compression.get("quant_method") != QUANT_METHOD:
                return base.from_configs(hf_config, *args, **options)
            dense = copy.deepcopy(hf_config)
            del dense.quantization_config  # vllm-neuron refuses methods that are not its own
            model = base.from_configs(dense, *args, **options)
            # A model is compiled with these weights, so the loader without weights is the same.
            model.load_weights = model.load_weights_lite = lambda path, device, cache_dir=None: _load(
                model, path, device
            )
            return model

    LowRank.__name__, LowRank.__qualname__ = base.__name__, base.__qualname__
    return LowRank


def _load(model: Any, path: str, device: torch.device) -> None:
    """Load a compressed checkpoint into a model of vllm-neuron, with its kernels where vllm-neuron runs kernels."""
    from vllm_neuron.utils.neuron_utils import can_run_kernel
    from vllm_neuron.utils.weight_loader import get_weight_loader

    launcher = _launcher if can_run_kernel(str(device)) else None
    vllm_modules.load_weights(model, Path(path), device, get_weight_loader, launcher)


def _launcher(function: Any) -> Any:
    """Return vllm-neuron's caller of a kernel function."""
    import nki
    from libtorch_neuronx_lite.nki.nki_hop import wrap_nki

    return wrap_nki(nki.jit(function))
