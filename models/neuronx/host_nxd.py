"""The adapter to NxD Inference (0.9); it needs that package and the SDK or its emulation.

NxD's applications stay as they are, but for two of their seams: ``init_model``, after which the plugin puts its modules
into the layers, and ``convert_hf_to_neuron_state_dict``. On a device NxD compiles the model and holds the weights; with
an emulated SDK its own CPU mode runs the same modules.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from neuronx_distributed_inference._version import __version__
from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter
from torch import Tensor
from transformers import PretrainedConfig

from neuronmm.kernels.cache import cache_folder, write_folder
from neuronmm.models.errors import UserError
from neuronmm.models.neuronx import nxd_inputs, nxd_modules
from neuronmm.models.neuronx.architecture import Architecture
from neuronmm.models.neuronx.checkpoint import Checkpoint
from neuronmm.models.neuronx.nxd_weights import convert, shards
from neuronmm.models.neuronx.sdk import EMULATED, compiler_version
from neuronmm.models.neuronx.settings import Settings
from neuronmm.models.neuronx.weights import Shards

logging.getLogger("Neuron").setLevel(logging.ERROR)  # it warns of how it spreads the heads, once per layer

NAME = "nxd-inference"
VERSION = __version__
_CLASSES = {"llama": "NeuronLlamaForCausalLM", "qwen2": "NeuronQwen2ForCausalLM", "qwen3": "NeuronQwen3ForCausalLM"}
"""Model type -> NxD's class of it, as its table ``MODEL_TYPES`` has it, whose module imports vision models too."""


def emulated() -> bool:
    """Return whether the SDK is emulated, so that NxD runs in its CPU mode."""
    return EMULATED in str(compiler_version())


def graphs(model: Model, length: int) -> tuple[Any, Any]:
    """Refuse: NxD's CPU mode writes no graph whose time could be predicted."""
    raise UserError(
        "NxD Inference's CPU mode builds no graph to predict a time from; `neuronmm predict` predicts from the sizes"
    )


@cache
def application(model_type: str) -> Any:
    """Return NxD's application class of a model type, with the plugin's modules and weights."""
    module = import_module(f"neuronx_distributed_inference.models.{model_type}.modeling_{model_type}")
    base: Any = getattr(module, _CLASSES[model_type])

    class Layers(base._model_cls):  # type: ignore[misc,name-defined]
        """NxD's model with the plugin's modules in its layers."""

        def init_model(self, config: Any) -> None:
            super().init_model(config)
            split = _shards(config)
            for layer, plan in zip(self.layers, split.plans, strict=True):
                nxd_modules.install(layer, plan, split.checkpoint.dtype, split.tp_degree)

    class Application(base):  # type: ignore[misc,valid-type]
        """NxD's application on a checkpoint of neuronmm."""

        _model_cls = Layers

        @staticmethod
        def convert_hf_to_neuron_state_dict(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
            return convert(base.convert_hf_to_neuron_state_dict(state_dict, config), _shards(config))

    return Application


def _shards(config: Any) -> Shards:
    """Return the checkpoint that a configuration of NxD names, split; only headers are read."""
    neuron = config.neuron_config
    checkpoint = Checkpoint(Path(config.neuronmm_folder), neuron.torch_dtype)
    return shards(checkpoint, neuron.tp_degree)


def inference_config(cls: Any, shards: Shards, settings: Settings) -> Any:
    """Return the configuration of an application class of NxD."""
    sizes: dict[str, Any] = {
        "batch_size": settings.batch_size,
        "seq_len": settings.n_positions,
        "max_context_length": settings.n_positions,
        "torch_dtype": settings.dtype,
        "tp_degree": settings.tp_degree,
        "padding_side": "right",
        "on_cpu": emulated(),
        "logical_nc_config": 1,
    }
    if settings.continuous:
        sizes.update(is_continuous_batching=True, ctx_batch_size=1)
    if not emulated():
        buckets = settings.buckets
        sizes.update(enable_bucketing=True, context_encoding_buckets=buckets, token_generation_buckets=buckets)
    attributes = _attributes(shards.checkpoint)

    def load(config: Any) -> None:
        config.__dict__.update(attributes)

    config_class = cls.get_config_cls()
    return config_class(config_class.get_neuron_config_cls()(**sizes), load_config=load)


def _attributes(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what NxD reads of a model's configuration, and the folder for the plugin."""
    a: Architecture = checkpoint.architecture
    names = {
        "hidden_size": a.hidden,
        "intermediate_size": a.intermediate,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head,
        "vocab_size": a.vocabulary,
        "max_position_embeddings": a.positions,
        "rms_norm_eps": a.epsilon,
        "rope_theta": a.rope_theta,
        "rope_scaling": a.rope_scaling,
    }
    return {
        **names,
        "model_type": a.model_type,
        "hidden_act": "silu",
        "attention_bias": checkpoint.has(checkpoint.bias("model.layers.0.self_attn.o_proj")),
        "mlp_bias": checkpoint.has(checkpoint.bias("model.layers.0.mlp.down_proj")),
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": list(a.ends),
        "tie_word_embeddings": not checkpoint.has("lm_head.weight"),
        "output_attentions": False,
        "output_hidden_states": False,
        "transformers_version": None,
        "neuronmm_folder": str(checkpoint.folder),
    }


class Model:
    """An application of NxD on the checkpoint. A call is one step, with the arguments of the HLO hosts' models."""

    def __init__(self, shards: Shards, settings: Settings) -> None:
        self.settings = settings
        cls = application(shards.checkpoint.architecture.model_type)
        config = inference_config(cls, shards, settings)
        self.application = cls(str(shards.checkpoint.folder), config)

    def __call__(self, input_ids: Tensor, cache_ids: Tensor | None, start_ids: Tensor) -> Tensor:
        """Return the logits of each row's last token, [rows, vocabulary].

        Dimensions: ``input_ids`` [rows, length]. In a static batch rows are left-padded, ``start_ids`` [rows] are their
        paddings, and ``cache_ids`` [1] is the position of a decode step, None for prompts. In a continuous batch
        ``cache_ids`` [rows, length] are positions and ``start_ids`` [rows] slots.
        """
        prepare = nxd_inputs.slots if self.settings.continuous else nxd_inputs.batch
        step = prepare(input_ids, cache_ids, start_ids, self.settings.n_positions)
        return self.run(step)

    def run(self, step: nxd_inputs.Step) -> Tensor:
        """Call NxD's forward."""
        # NxD's CPU mode stores each step's cache as a parameter, which a tensor of inference mode cannot be.
        with torch.inference_mode(False), torch.no_grad():
            inputs = {name: tensor.clone() for name, tensor in step.inputs.items()}
            logits = self.application(**inputs, return_dict=True).logits
        return logits[:, -1][step.rows]


def to_cores(model: Model, name: str) -> bool | None:
    """Load ``model`` onto its cores, compiled or from the cache entry ``name``; return True for a hit.

    None: NxD's CPU mode compiles nothing.
    """
    application = model.application
    if emulated():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of keys that NxD's model does not have
            application.to_cpu()
        return None
    folder = cache_folder() / "neuronx" / name
    hit = folder.is_dir()
    if not hit:
        write_folder(folder, lambda partial: application.compile(str(partial)))
    application.load(str(folder))
    return hit


class Generation:
    """NxD's ``generate`` on a model that is already on its cores."""

    def __init__(self, model: Model, config: PretrainedConfig, settings: Settings) -> None:
        self.adapter = HuggingFaceGenerationAdapter(model.application)

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Return prompts and new tokens [batch, ...]. Dimensions: both arguments [batch, prompt], left-padded.

        NxD pads on the right, so rows are moved there and back.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        start = mask.int().argmax(1)
        right, mask = nxd_inputs.moved(input_ids, start), nxd_inputs.moved(mask, start)
        with torch.no_grad():
            tokens = self.adapter.generate(right, attention_mask=mask, **options)
        return torch.cat([input_ids, tokens[:, input_ids.shape[1] :]], dim=1)
