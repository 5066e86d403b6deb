"""The adapter to transformers-neuronx (0.13); it needs that package and the SDK or its emulation."""

# pyright: reportMissingImports=false
from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers_neuronx import NeuronConfig, __version__, activations, hlo, ops
from transformers_neuronx.config import ContinuousBatchingConfig
from transformers_neuronx.generation_utils import HuggingFaceGenerationModelAdapter
from transformers_neuronx.layers import attention, rotary
from transformers_neuronx.llama.hlo import LlamaForSamplingNoEmbeddingHlo
from transformers_neuronx.llama.model import LlamaForSampling
from transformers_neuronx.nki.compile import nki_call

from neuronmm.models.neuronx.graph import GraphOps, LayerGraph
from neuronmm.models.neuronx.layer_call import LayerCall
from neuronmm.models.neuronx.settings import Settings, host_config
from neuronmm.models.neuronx.weights import Shards, fill, names

NAME = "transformers-neuronx"
VERSION = __version__


def graphs(model: Model, length: int) -> tuple[Any, Any]:
    """Return two compiled graphs as HLO modules: for a prompt of ``length`` tokens, and for a decode step."""
    sizes = (next(size for size in model.context_buckets if size >= n) for n in (length, length + 1))
    prompt_key, token_key = zip(sizes, (model.context_batch_sizes[-1], model.batch_sizes[-1]), strict=True)
    token = model.decoder_lm_head.program.kernels[token_key].hlo_module
    prompt = model.decoder_lm_head_for_context[prompt_key].program.kernels[prompt_key].hlo_module
    return (prompt if length > 1 else token), token


def graph_ops(settings: Settings, neuron_config: NeuronConfig) -> GraphOps:
    """Return the host's graph functions for a build."""
    tp = settings.tp_degree
    build = {"tp_degree": tp, "neuron_config": neuron_config}
    return GraphOps(
        f=hlo,
        silu=activations.silu,
        norm=partial(hlo.rms_norm, **build),
        rotate=partial(rotary.rotate_half, tp_degree=tp),
        scale=attention.scale,
        score=partial(attention.score, n_kv_heads=1, **build),
        mask=partial(attention.mask, tp_degree=tp),
        context=partial(attention.context, n_kv_heads=1, **build),
        combine=partial(attention.context_combined, n_kv_heads=1, **build),
        update=partial(attention.fused_kv_update_cache, neuron_config=neuron_config),
        all_reduce=partial(hlo.all_reduce_sum, tp_degree=tp),
        nki_call=nki_call,
    )


class LayerBuilder:
    """Build the layers that the host's decoder asks for; the host's own builder does the rest."""

    def __init__(self, shards: Shards, graph: LayerGraph) -> None:
        self.plans, self.graph, self.index = shards.plans, graph, 0
        self.call = LayerCall(LlamaForSamplingNoEmbeddingHlo.layer, f"{NAME} {VERSION}")

    def layer(self, *arguments: Any) -> Any:
        plan = self.plans[self.index % len(self.plans)]
        self.index += 1
        return self.graph(plan, *self.call(arguments, len(names(plan))))


class Model(LlamaForSampling):
    """The host's Llama model with the checkpoint's weights and layers."""

    def __init__(self, shards: Shards, settings: Settings) -> None:
        neuron_config = NeuronConfig(
            attention_layout=settings.layout,
            collectives_layout=settings.layout,
            continuous_batching=ContinuousBatchingConfig(max_num_seqs=settings.batch_size)
            if settings.continuous
            else None,
        )
        super().__init__(
            host_config(shards.checkpoint.architecture),
            n_positions=settings.buckets,
            context_length_estimate=settings.buckets,
            batch_size=settings.batch_size,
            amp=settings.amp.replace("fp", "f"),
            tp_degree=settings.tp_degree,
            neuron_config=neuron_config,
        )
        graph = LayerGraph(graph_ops(settings, neuron_config), shards.checkpoint.architecture, settings)
        self.decoder_lm_head.add_layer_builder(LayerBuilder(shards, graph).layer)
        self.shards = shards

    def load_weights(self) -> None:
        self.chkpt_model.model.embed_tokens = nn.Embedding.from_pretrained(self.shards.checkpoint.embedding())
        fill(self.decoder_lm_head, self.shards, ops.parallel_to_nc)
        self.init_rest_of_model()


class Generation(HuggingFaceGenerationModelAdapter):
    """The host's ``generate`` on a model that is already on its cores."""

    def __init__(self, model: Model, config: PretrainedConfig, settings: Settings) -> None:
        super().__init__(config, model)
