"""The bridge to transformers: a registered quantizer, so that a plain ``from_pretrained`` gives the compressed model.

Works on transformers 4.47 to 5.x. ``register`` is called once, by ``import neuronmm``.
Source: https://huggingface.co/docs/transformers/main/en/quantization/contribute
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

from safetensors import safe_open
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS
from neuronmm.models.int8_linear import Int8Linear
from neuronmm.models.lowrank import FACTORS
from neuronmm.models.patch import patch
from neuronmm.models.spec import QUANT_METHOD, CompressionSpec


class _Method(str, Enum):
    """transformers 4.47 reads ``quant_method.value``, so a plain string is not enough."""

    NEURONMM = QUANT_METHOD


class NeuronMMConfig(QuantizationConfigMixin):
    """config.json's ``quantization_config`` block, validated, in the form transformers wants."""

    quant_method: Any

    def __init__(self, /, **block: Any) -> None:
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
    """Patches the empty model before its weights load; everything after that is ordinary transformers.

    transformers fills a weight that the checkpoint lacks with random numbers and goes on with a warning. A compressed
    model would then babble, so a weight missing from the decoder layers is an error here. transformers 5 shows a
    quantizer the files, 4.x the keys it expects and those it found.
    """

    requires_calibration = True
    requires_parameters_quantization = True  # 4.x: ask check_quantized_param
    required_packages = None
    quantization_config: NeuronMMConfig

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        try:
            patch(model, self.quantization_config.spec)
        except UserError as error:
            raise UserError(f"{model.name_or_path}: {error}") from None
        held: set[str] = set()
        for file in checkpoint_files or ():
            with safe_open(file, framework="pt") as tensors:
                held.update(tensors.keys())
        if held:
            _refuse_missing(model, (name for name in model.state_dict() if name not in held))
        return model

    def update_expected_keys(self, model: Any, expected_keys: list[str], loaded_keys: list[str]) -> list[str]:
        # Not update_missing_keys: 4.47 takes two weights of one size for tied and then leaves one out of that list.
        _refuse_missing(model, sorted(set(expected_keys) - set(loaded_keys)))
        return expected_keys

    def check_quantized_param(self, model: Any, param_value: Any, param_name: str, *args: Any, **kwargs: Any) -> bool:
        # 4.x converts every float tensor to the model's dtype, but the scales of int8 factors have to stay float32.
        return param_name.endswith(".weight_scale")

    def create_quantized_param(
        self, model: Any, param_value: Any, param_name: str, target_device: Any, state_dict: dict[str, Any], *args: Any
    ) -> None:
        from accelerate.utils import set_module_tensor_to_device

        # The file may know the model by a longer name; what comes with it as ``param_value`` is converted already.
        stored = next((tensor for name, tensor in state_dict.items() if name.endswith(param_name)), param_value)
        set_module_tensor_to_device(model, param_name, target_device, stored)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for module in model.modules():
            if isinstance(module, Int8Linear):
                module.weight_scale.requires_grad_(False)
        # The other factors are ordinary floating-point weights: .half(), .to(dtype) and training stay allowed.
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


def _refuse_missing(model: Any, names: Iterable[str]) -> None:
    """Raise if a weight of the decoder layers, or a factor anywhere, is among the ``names`` that are not stored."""
    for name in names:
        if LAYERS in name or name.endswith(FACTORS):
            where = f"{model.name_or_path}: config.json and weights disagree"
            raise UserError(f"{where}: {name} is in no shard; compress the model again")


def register() -> None:
    """Enter the quantizer in transformers' tables; safe to call again."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(QUANT_METHOD, NeuronMMConfig)
    auto.AUTO_QUANTIZER_MAPPING.setdefault(QUANT_METHOD, NeuronMMQuantizer)
