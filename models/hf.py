"""The bridge to transformers: a registered quantizer with which a plain ``from_pretrained`` loads a compressed model.

Supports transformers 4.47 to 5.x. ``import neuronmm`` calls ``register``.
Source: https://huggingface.co/docs/transformers/main/en/quantization/contribute
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS
from neuronmm.models.low_bits import LowBitsModule, tie_head
from neuronmm.models.lowrank import FACTORS, LowRankLinear
from neuronmm.models.patch import patch
from neuronmm.models.spec import QUANT_METHOD, CompressionSpec
from neuronmm.models.tensors import EMBEDDING, check_pivots


class _Method(str, Enum):
    """transformers 4.47 reads ``quant_method.value``, so a plain string is not enough."""

    NEURONMM = QUANT_METHOD


class NeuronMMConfig(QuantizationConfigMixin):
    """The ``quantization_config`` block of config.json, validated, in the form that transformers expects."""

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
    """Patches the empty model before its weights load; transformers does everything after that.

    transformers initialises a weight that the checkpoint lacks at random and only warns. A compressed model would then
    generate noise, so a missing weight of a decoder layer is an error here. transformers 5 passes the files to the
    quantizer; 4.x passes the expected and the loaded keys.
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
        stored: set[str] = set()
        for file in checkpoint_files or ():
            with safe_open(file, framework="pt") as tensors:
                stored.update(tensors.keys())
        if stored:
            _refuse_missing(model, (name for name in model.state_dict() if name not in stored))
        return model

    def update_expected_keys(self, model: Any, expected_keys: list[str], loaded_keys: list[str]) -> list[str]:
        # Not update_missing_keys: 4.47 treats two weights of equal size as tied and omits one of them from that list.
        _refuse_missing(model, sorted(set(expected_keys) - set(loaded_keys)))
        return expected_keys

    def check_quantized_param(self, model: Any, param_value: Any, param_name: str, *args: Any, **kwargs: Any) -> bool:
        # 4.x converts every float tensor to the model's dtype, but scales must stay float32, and fp8 factors fp8.
        fp8 = self.quantization_config.spec.factors == "fp8" and param_name.endswith(FACTORS)
        return fp8 or param_name.endswith(".weight_scale")

    def create_quantized_param(
        self, model: Any, param_value: Any, param_name: str, target_device: Any, state_dict: dict[str, Any], *args: Any
    ) -> None:
        from accelerate.utils import set_module_tensor_to_device

        # The name in the file may have a prefix. ``param_value`` is already converted, so it is the last resort.
        stored = next((tensor for name, tensor in state_dict.items() if name.endswith(param_name)), param_value)
        set_module_tensor_to_device(model, param_name, target_device, stored)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        tie_head(model)  # 4.x ties the values only
        for name, module in model.named_modules():
            if isinstance(module, LowBitsModule):
                module.weight_scale.requires_grad_(False)
                module.weight.requires_grad_(False)
            if not isinstance(module, LowRankLinear):
                continue
            pivots = module.factors.pivots
            if isinstance(pivots, Tensor) and not pivots.is_meta:  # offloaded buffers have no values here
                check_pivots(f"{name}.pivots", pivots, module.out_features, model.name_or_path)
        # The other factors are ordinary floating-point weights: .half(), .to(dtype) and training remain possible.
        model.is_quantized = False
        return model

    # transformers does not annotate the two that follow; pyright infers None from their empty bodies.
    def is_serializable(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, safe_serialization: bool | None = None
    ) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _refuse_missing(model: Any, names: Iterable[str]) -> None:
    """Raise if the missing ``names`` include a weight of a decoder layer, a factor, or the scales of the embedding."""
    for name in names:
        if LAYERS in name or name.endswith((*FACTORS, f"{EMBEDDING}_scale")):
            where = f"{model.name_or_path}: config.json and weights disagree"
            raise UserError(f"{where}: {name} is in no shard; compress the model again")


def register() -> None:
    """Register the quantizer with transformers; repeated calls are harmless."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(QUANT_METHOD, NeuronMMConfig)
    auto.AUTO_QUANTIZER_MAPPING.setdefault(QUANT_METHOD, NeuronMMQuantizer)
