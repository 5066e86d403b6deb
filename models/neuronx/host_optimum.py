"""The adapter to optimum-neuron's HLO backend (0.2.0); it needs that package and the SDK or its emulation."""

# pyright: reportMissingImports=false
from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from optimum.neuron.models.inference.hlo.backend import activations, functional, ops
from optimum.neuron.models.inference.hlo.backend.config import HloNeuronConfig
from optimum.neuron.models.inference.hlo.backend.layers import attention, rotary
from optimum.neuron.models.inference.hlo.backend.modeling_decoder import HloModelForCausalLM
from optimum.neuron.models.inference.hlo.backend.nki import nki_call
from optimum.neuron.models.inference.hlo.llama.hlo import LlamaGraphBuilder
from optimum.neuron.models.inference.hlo.llama.model import LlamaHloModel
from torch import nn
from transformers import GenerationConfig, PretrainedConfig

from neuronmm.models.neuronx.graph import GraphOps, LayerGraph
from neuronmm.models.neuronx.layer_call import LayerCall
from neuronmm.models.neuronx.settings import Settings, host_config
from neuronmm.models.neuronx.weights import Shards, fill, names

NAME = "optimum-neuron"
VERSION = version("optimum-neuron")


def graphs(model: Model, length: int) -> tuple[Any, Any]:
    """Return two compiled graphs as HLO modules: for a prompt of ``length`` tokens, and for a decode step."""
    prompt, token = (d.program.kernel.hlo_module for d in (model.decoder_lm_head_for_context, model.decoder_lm_head))
    return (prompt if length > 1 else token), token


def graph_ops(settings: Settings) -> GraphOps:
    """Return the host's graph functions for a build."""
    tp = settings.tp_degree
    return GraphOps(
        f=functional,
        silu=activations.silu,
        norm=functional.rms_norm,
        rotate=partial(rotary.rotate_half, tp_degree=tp),
        scale=attention.scale,
        score=partial(attention.score, n_kv_heads=1),
        mask=partial(attention.mask, tp_degree=tp),
        context=partial(attention.context, n_kv_heads=1, tp_degree=tp),
        combine=partial(attention.context_combined, n_kv_heads=1),
        update=attention.fused_kv_update_cache,
        all_reduce=partial(functional.all_reduce_sum, tp_degree=tp),
        nki_call=nki_call,
    )


class GraphBuilder(LlamaGraphBuilder):
    """The host's Llama graph with neuronmm's layers."""

    def __init__(self, config: Any, neuron_config: HloNeuronConfig, shards: Shards, graph: LayerGraph) -> None:
        super().__init__(config, neuron_config)
        self.plans, self.graph, self.index = shards.plans, graph, 0
        self.call = LayerCall(LlamaGraphBuilder.layer, f"{NAME} {VERSION}")

    def pre_layer(self, hidden: Any, cache_ids: Any, start_ids: Any) -> Any:
        self.index = 0
        return super().pre_layer(hidden, cache_ids, start_ids)

    def layer(self, *arguments: Any) -> Any:
        plan = self.plans[self.index]
        self.index += 1
        return self.graph(plan, *self.call(arguments, len(names(plan))))


class Model(LlamaHloModel):
    """The host's Llama model with the checkpoint's weights and layers."""

    def __init__(self, shards: Shards, settings: Settings) -> None:
        config = host_config(shards.checkpoint.architecture)
        neuron_config = HloNeuronConfig(
            sequence_length=settings.n_positions,
            batch_size=settings.batch_size,
            auto_cast_type=settings.amp,
            tp_degree=settings.tp_degree,
            attention_layout=settings.layout,
            collectives_layout=settings.layout,
            continuous_batching=settings.continuous,
        )
        graph = LayerGraph(graph_ops(settings), shards.checkpoint.architecture, settings)
        builder = GraphBuilder(config, neuron_config, shards, graph)
        super().__init__(config, neuron_config, cpu_model=nn.Module(), hlo_builder=builder)
        self.shards = shards

    def load_weights(self) -> None:
        decoder = self.decoder_lm_head
        self.cpu_model.model = nn.Module()
        self.cpu_model.model.embed_tokens = nn.Embedding.from_pretrained(self.shards.checkpoint.embedding())
        fill(decoder, self.shards, ops.parallel_to_nc)
        self.decoder_lm_head_for_context.load_shared_weights(decoder)
        for program in (decoder, self.decoder_lm_head_for_context):
            program.use_executor = True


class Generation(HloModelForCausalLM):
    """The host's ``generate`` on a model that is already on its cores."""

    def __init__(self, model: Model, config: PretrainedConfig, settings: Settings) -> None:
        self.config, self.neuron_config, self.model = config, model.neuron_config, model
        self.generation_config = GenerationConfig.from_model_config(config)
        self.batch_size, self.max_length = settings.batch_size, settings.n_positions
        self.continuous_batching = settings.continuous
        self.device = torch.device("cpu")
