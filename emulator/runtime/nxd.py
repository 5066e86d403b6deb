"""What NxD Inference imports below itself (neuronx-distributed 0.18, neuronx-distributed-inference 0.9).

Only the names that its Llama, Qwen2 and Qwen3 models import are here; any other name is an ImportError. Names of
:data:`_ABSENT` exist because modules import them, but there is nothing behind them on a CPU: to use one raises
:class:`NotEmulatedError`. NxD's own CPU mode (``NXD_CPU_MODE=1``) uses none of them: it runs its modules in plain
torch, with gloo between the ranks. ``nki.jit`` interprets kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NoReturn

import torch

from neuronmm.emulator.nki.tensors import TARGET
from neuronmm.emulator.pyhlo.messages import HLO, METANEFF, XLA_DATA

VERSION = "2.9.0.2.13.0+emulated"
COMPILER = "2.24.5133.0+emulated"
"""The versions the emulator reports: those of SDK 2.29, the first with NxD Inference 0.9."""

_ABSENT: dict[str, tuple[str, ...]] = {
    "torch_xla.distributed.parallel_loader": ("MpDeviceLoader",),
    "torch_xla.distributed.zero_redundancy_optimizer": ("ZeroRedundancyOptimizer",),
    "torch_xla.utils.checkpoint": ("checkpoint",),
    "torch_xla.utils.utils": ("get_free_tcp_ports",),
    "torch_neuronx": ("BucketModelConfig",),
    "torch_neuronx.experimental.profiler.v2_x.custom_op_name": ("hlo_debug",),
    "torch_neuronx.xla_impl.bucket_trace": ("create_bucket_model",),
    "torch_neuronx.xla_impl.custom_call_targets": (
        "AwsNeuronModuleMarkerStartForward", "AwsNeuronModuleMarkerEndForward",
    ),
    "torch_neuronx.xla_impl.ops": ("Argmax", "ConcatenateOp", "RmsNorm", "TopK"),
    "torch_neuronx.xla_impl.structure": ("Packer",),
    "torch_neuronx.xla_impl.torchscript": ("replace_weights",),
    "torch_neuronx.xla_impl.trace": (
        "HloArtifacts", "NeffArtifacts", "generate_neff", "get_hlo_computation_by_id", "get_hlo_root_instruction",
        "get_torch_dtype", "hlo_entry_computation",
    ),
    "libneuronxla": ("neuron_xla_compile", "neuron_xla_wlo_compile"),
    "neuronxcc.nki._pre_prod_kernels.blockwise_mm": ("blockwise_mm_baseline", "blockwise_mm_baseline_shard_hidden"),
    "neuronxcc.nki._pre_prod_kernels.blockwise_mm_bwd": ("blockwise_mm_bwd", "blockwise_mm_bwd_baseline_shard_hidden"),
    "neuronxcc.nki._pre_prod_kernels.ring_attention": ("ring_attention_fwd", "ring_attention_bwd"),
    "neuronxcc.nki.compiler.backends.neuron.dimensions": ("VNC",),
    "neuronxcc.nki.kernels.attention": ("FlashConfig",),
    "nkilib.core.attention.attention_cte": ("attention_cte",),
    "nkilib.core.cumsum.cumsum": ("cumsum",),
    "nkilib.core.max.cascaded_max": ("cascaded_max",),
    "nkilib.core.mlp.mlp": ("mlp",),
    "nkilib.core.moe.moe_cte.bwmm_shard_on_I": (
        "blockwise_mm_baseline_shard_intermediate", "blockwise_mm_baseline_shard_intermediate_hybrid",
        "blockwise_mm_shard_intermediate_dropping",
    ),
    "nkilib.core.moe.moe_cte.bwmm_shard_on_block": ("bwmm_shard_on_block",),
    "nkilib.core.moe.moe_cte.bwmm_shard_on_block_mx": ("bwmm_shard_on_block_mx",),
    "nkilib.core.moe.moe_cte.moe_cte": ("moe_cte",),
    "nkilib.core.moe_block.moe_block_tkg": ("moe_block_tkg",),
    "nkilib.core.output_projection.output_projection_cte": ("output_projection_cte",),
    "nkilib.core.qkv.qkv": ("qkv",),
    "nkilib.core.rmsnorm.rmsnorm_quant": ("RmsNormQuantKernelArgs", "rmsnorm_quant_kernel"),
    "nkilib.core.subkernels.find_nonzero_indices": ("find_nonzero_indices",),
    "nkilib.core.subkernels.indexed_flatten": ("indexed_flatten",),
    "nkilib.core.topk": ("topk",),
    "nkilib.core.utils.common_types": ("NormType", "QKVOutputLayout", "QuantizationType"),
    "nkilib.core.utils.kernel_helpers": ("get_verified_program_sharding_info", "kernel_assert"),
    "nkilib.core.utils.tensor_view": ("TensorView",),
    "nkilib.experimental.transformer.attention_block_tkg": ("attention_block_tkg",),
}  # fmt: skip
"""Module -> names that are imported there and never used in NxD's CPU mode."""
_EMPTY = (
    "torch_xla", "torch_xla.core", "torch_xla.core.xla_env_vars", "torch_xla.distributed",
    "torch_xla.distributed.xla_multiprocessing", "torch_xla.runtime", "torch_xla.utils",
    "torch_xla.utils.serialization", "torch_neuronx.experimental", "torch_neuronx.experimental.profiler",
    "torch_neuronx.experimental.profiler.v2_x", "torch_neuronx.proto", "torch_neuronx.pyhlo", "torch_neuronx.xla_impl",
    "neuronxcc.nki._pre_prod_kernels", "neuronxcc.nki.compiler.backends", "neuronxcc.nki.compiler.backends.neuron",
    "nkilib", "nkilib.core", "nkilib.core.attention", "nkilib.core.cumsum", "nkilib.core.max", "nkilib.core.mlp",
    "nkilib.core.moe", "nkilib.core.moe.moe_cte", "nkilib.core.moe_block", "nkilib.core.output_projection",
    "nkilib.core.qkv", "nkilib.core.rmsnorm", "nkilib.core.subkernels", "nkilib.core.utils", "nkilib.experimental",
    "nkilib.experimental.transformer",
)  # fmt: skip
"""Modules that are only imported, or only lead to others."""
CLASSES = ("SPMDModel", "LayoutTransformation")
"""Classes of ``torch.classes.neuron`` that NxD names in annotations."""


class NotEmulatedError(RuntimeError):
    """A part of the Neuron SDK that NxD's CPU mode does not need was used."""


class SkipMode:
    """``nkilib``'s record of two flags, which a module creates when it is imported."""

    def __init__(self, skip_token: bool, skip_weight: bool) -> None:
        self.skip_token, self.skip_weight = skip_token, skip_weight


class CollectivesConfig:
    """The ring of each replica group: rank -> pairs of source and target. NxD keeps its rank's for ring attention."""

    def __init__(self, replica_groups: Sequence[Sequence[int]]) -> None:
        self.rank_src_tgt_pairs = {
            rank: list(zip(group, [*group[1:], group[0]], strict=True)) for group in replica_groups for rank in group
        }


def platform_target(compiler_flags: str | None = None) -> str:
    """Return the device that the environment names, ``trn1`` if it names none; the flags are ignored."""
    return os.environ.get(TARGET, "trn1")


def surface() -> dict[str, dict[str, Any]]:
    """Return module name -> attributes, without the NKI dialects themselves."""
    modules: dict[str, dict[str, Any]] = {name: {} for name in _EMPTY}
    for module, names in _ABSENT.items():
        modules.setdefault(module, {}).update({name: _absent(f"{module}.{name}") for name in names})
    merged: Mapping[str, dict[str, Any]] = {
        "torch_xla.core.xla_model": {"REDUCE_SUM": "sum", "REDUCE_MAX": "max", "REDUCE_MIN": "min"},
        "torch_neuronx": {"__version__": VERSION},
        "torch_neuronx.utils": {"get_platform_target": platform_target},
        "torch_neuronx.utils.utils": {"get_platform_target": platform_target, "SUPPORTED_TYPES": ()},
        "torch_neuronx.proto.metaneff_pb2": METANEFF,
        "torch_neuronx.pyhlo.hlo_pb2": HLO,
        "torch_neuronx.pyhlo.xla_data_pb2": XLA_DATA,
        "torch_neuronx.xla_impl.base": {"xla_call": _graph_call, "xla_hlo_call": _graph_call},
        "torch_neuronx.xla_impl.ops": {"nki_jit": _nki_jit, "xla_hlo_call": _graph_call},
        "torch_neuronx.xla_impl.trace": {"XLA_DTYPE_TO_METANEFF_DTYPE": {}},
        "libneuronxla": {"__version__": "2.2.16408.0+emulated"},
        "neuronxcc": {"__version__": COMPILER},
        "neuronxcc.nki._pre_prod_kernels.collectives": {"CollectivesConfig": CollectivesConfig},
        "nki.language": {"float4_e2m1fn_x4": _absent("nki.language.float4_e2m1fn_x4")},
        "nkilib.core.moe.moe_cte.moe_cte_utils": {
            "SkipMode": SkipMode,
            "BlockShardStrategy": Enum("BlockShardStrategy", ["HI_LO"]),
        },
        "nkilib.core.utils.common_types": {
            "ActFnType": Enum("ActFnType", ["SiLU"]),
            "ExpertAffinityScaleMode": Enum("ExpertAffinityScaleMode", ["NO_SCALE", "POST_SCALE"]),
            "RouterActFnType": Enum("RouterActFnType", ["SIGMOID", "SOFTMAX"]),
        },
    }
    for module, attributes in merged.items():
        modules.setdefault(module, {}).update(attributes)
    return modules


def classes() -> dict[str, type]:
    """Return the attributes of ``torch.classes.neuron``."""
    return {name: _absent(f"torch.classes.neuron.{name}") for name in CLASSES}


def _absent(name: str) -> type:
    """Return a class that can be imported, named in an annotation and inherited from, but not used."""

    def refuse(cls: type, *arguments: Any, **options: Any) -> NoReturn:
        raise NotEmulatedError(f"{name} is not emulated: NxD's CPU mode does not use it")

    return type(name.rpartition(".")[2], (torch.autograd.Function,), {"__new__": refuse, "apply": classmethod(refuse)})


def _graph_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that writes a graph: the result can be defined, but not called."""
    return _absent(f"{function.__module__}.{function.__qualname__}")


def _nki_jit(**options: Any) -> Callable[..., Any]:
    """``torch_neuronx.xla_impl.ops.nki_jit``: kernels of AWS in the first dialect, which are not emulated."""
    return _graph_call
