"""vLLM's view of the ``quantization_config`` block: which of its linears are low-rank, and the early checks.

The checks run in the process that the user started, before vLLM starts its workers. A broken checkpoint thus ends with
one line, not with the traceback of another process.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from neuronmm.models import CompressionSpec, UserError
from neuronmm.models.contents import inspect
from neuronmm.models.spec import QUANT_METHOD
from neuronmm.serving.vllm import neuron
from neuronmm.serving.vllm.head import HeadMethod, core_is_faster
from neuronmm.serving.vllm.method import LowRankMethod


class LowRankConfig(QuantizationConfig):
    """The compression of one checkpoint."""

    def __init__(self, spec: CompressionSpec) -> None:
        super().__init__()
        self.spec = spec

    def get_name(self) -> Any:
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # plain torch runs on every GPU

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json describes the compression

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LowRankConfig:
        spec = CompressionSpec.parse(config, "config.json")
        if spec.few_bits is not None:
            raise UserError(f"config.json: {spec.few_bits}, which vLLM cannot run; use neuronmm serve")
        if spec.factors == "fp8" and not neuron.active():
            raise UserError(
                "config.json: vLLM does not serve fp8 factors, which are Trainium's; compress to int8 instead"
            )
        return cls(spec)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Check that config.json and the shards of a local folder agree.

        Raises:
            UserError: they do not.
        """
        if Path(model_name).is_dir():
            inspect(Path(model_name))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a linear, None for other layers.

        A linear of vLLM stands for one linear of the checkpoint, or for several with the same input. Dense ones and the
        head are the core's where it is faster.
        """
        if isinstance(layer, ParallelLMHead) and core_is_faster():
            return HeadMethod()
        if not isinstance(layer, LinearBase):
            return None
        parent, _, last = prefix.rpartition(".")
        names = [f"{parent}.{part}" for part in self.packed_modules_mapping.get(last, [last])]
        if not any(name in self.spec.ranks for name in names) and not core_is_faster():
            return UnquantizedLinearMethod()
        return LowRankMethod(self.spec, names)
