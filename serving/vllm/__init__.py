"""The vLLM plugin: vLLM finds it through the entry point ``vllm.general_plugins`` and calls ``register``.

After that vLLM serves a compressed checkpoint as it is: its config.json names the method ``neuronmm``. This module
imports vLLM only inside ``register``, so that neuronmm installs and imports without it.
"""

# pyright: reportMissingImports=false
from __future__ import annotations


def register() -> None:
    """Register the method ``neuronmm`` with vLLM, and its models with vllm-neuron; repeated calls are harmless."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from neuronmm.models.spec import QUANT_METHOD
    from neuronmm.serving.vllm import neuron
    from neuronmm.serving.vllm.config import LowRankConfig

    register_quantization_config(QUANT_METHOD)(LowRankConfig)
    if neuron.present():
        neuron.register()
