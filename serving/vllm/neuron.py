"""The plugin for vllm-neuron (1.0 and later): its Llama and Qwen3 with low-rank MLPs.

vllm-neuron's worker registers the classes that ``vllm_neuron.model.registry.get_models`` returns, and builds a model
with ``from_configs``. :func:`register` puts subclasses into that module. They differ for compressed checkpoints only.

**Not run in vllm-neuron** (:mod:`neuronmm.models.neuronx.vllm_modules`).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import copy
import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from neuronmm.kernels.hardware import LOGICAL_CORE
from neuronmm.models.errors import UserError
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


def active() -> bool:
    """Return whether vLLM runs on vllm-neuron's platform in this process."""
    from vllm.platforms import current_platform

    return type(current_platform).__module__.partition(".")[0] == "vllm_neuron"


def register() -> None:
    """Let vllm-neuron serve compressed checkpoints; repeated calls are harmless.

    vLLM calls this whenever it starts, so models of vllm-neuron that cannot be imported must not stop it.
    """
    try:
        from vllm_neuron.model import registry
        from vllm_neuron.vllm.platform import NeuronPlatform
    except Exception as error:  # whatever a host that is only half imported raises
        print(f"neuronmm: no compressed models in vllm-neuron ({type(error).__name__}: {error})", file=sys.stderr)
        return
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
            model.load_weights = partial(_load, model)
            # vllm-neuron loads this one on the CPU, moves it to the meta device and compiles it ahead of time.
            model.load_weights_lite = partial(_load, model, runs_on="meta")
            return model

    LowRank.__name__, LowRank.__qualname__ = base.__name__, base.__qualname__
    return LowRank


def _load(model: Any, path: str, device: torch.device, cache_dir: Any = None, runs_on: str = "") -> None:
    """Load a compressed checkpoint into a model of vllm-neuron, with its kernels where vllm-neuron runs kernels.

    ``runs_on``: the type of the device that the model will run on, if it is not ``device``.

    Raises:
        UserError: the checkpoint is damaged or of a kind that cannot run there, or a logical core has several physical
            ones.
    """
    from vllm_neuron.utils.neuron_utils import can_run_kernel
    from vllm_neuron.utils.weight_loader import get_weight_loader

    launcher = _launcher if can_run_kernel(runs_on or str(device)) else None
    if launcher and os.environ.get(LOGICAL_CORE) != "1":
        raise UserError(f"{path}: its low-rank kernels run on one physical core; set {LOGICAL_CORE}=1 and start again")
    vllm_modules.load_weights(model, Path(path), device, get_weight_loader, launcher)


def _launcher(function: Any) -> Any:
    """Return vllm-neuron's caller of a kernel function."""
    import nki
    from libtorch_neuronx_lite.nki.nki_hop import wrap_nki

    return wrap_nki(nki.jit(function))
