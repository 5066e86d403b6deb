"""The bridge to transformers: a registered quantizer, so that a plain ``from_pretrained`` gives the compressed model.

Works on transformers 4.45 to 5.x. ``register`` is called once, by ``import neuronmm``.
Source: https://huggingface.co/docs/transformers/main/en/quantization/contribute
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from neuronmm.models.patch import patch
from neuronmm.models.spec import QUANT_METHOD, CompressionSpec


class _Method(str, Enum):
    """transformers 4.47 reads ``quant_method.value``, so a plain string is not enough."""

    NEURONMM = QUANT_METHOD


class NeuronMMConfig(QuantizationConfigMixin):
    """config.json's ``quantization_config`` block, validated, in the form transformers wants."""

    def __init__(self, **block: Any) -> None:
        block.pop("quant_method", None)
        self.__dict__.update(CompressionSpec.parse(block, "config.json").model_dump())
        self.quant_method = _Method.NEURONMM

    @property
    def spec(self) -> CompressionSpec:
        return CompressionSpec.parse(self.to_dict(), "config.json")

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "quant_method": QUANT_METHOD}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class NeuronMMQuantizer(HfQuantizer):
    """Patches the empty model before its weights load; everything after that is ordinary transformers."""

    requires_calibration = True
    requires_parameters_quantization = False
    required_packages = None
    quantization_config: NeuronMMConfig

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        return patch(model, self.quantization_config.spec)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        # The factors are ordinary floating-point weights: .half(), .to(dtype) and training stay allowed.
        model.is_quantized = False
        return model

    def is_serializable(self, safe_serialization: bool | None = None) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def register() -> None:
    """Enter the quantizer in transformers' tables; safe to call again."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(QUANT_METHOD, NeuronMMConfig)
    auto.AUTO_QUANTIZER_MAPPING.setdefault(QUANT_METHOD, NeuronMMQuantizer)
