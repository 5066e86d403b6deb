"""The supported families, and the refusal of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from neuronmm.models import FAMILIES, UserError, family_of
from neuronmm.models.families import LAYERS, TARGETS
from neuronmm.models.model_config import ModelConfig
from tiny_models import make_tiny


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_tables_fit_transformers_models(model_type: str) -> None:
    model = make_tiny(model_type)
    assert family_of(model.config.to_dict(), "here").architecture == type(model).__name__
    layer = model.get_submodule(f"{LAYERS}.0")
    linears = {name for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    assert linears == set(TARGETS["all"]) == set(TARGETS["mlp"]) | set(TARGETS["attention"])
    assert all(isinstance(p, torch.Tensor) for p in layer.parameters())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "MistralForCausalLM is not supported"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"model_type": "Llama", "architectures": ["LlamaForCausalLM"]}, "model_type 'Llama', architecture Llama"),
        ({}, "model_type None is not supported"),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "llama", "sliding_window": 64, "max_position_embeddings": 128}, "sliding_window.*to null"),
        ({"model_type": "llama", "sliding_window": 64}, "sliding_window"),
        ({"model_type": "llama", "attention_chunk_size": 64, "max_position_embeddings": 128}, "attention_chunk_size"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "'gelu'; only silu"),
    ],
)
def test_a_refusal_says_what_and_where_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        family_of(config, "some/config.json")
    assert str(caught.value).startswith("some/config.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "sliding_window": None},
        {"model_type": "llama", "sliding_window": 128, "max_position_embeddings": 128},
        {
            "model_type": "llama",
            "sliding_window": 64,
            "layer_types": ["full_attention"],
            "max_position_embeddings": 128,
        },
        {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False, "max_position_embeddings": 128},
    ],
)
def test_a_window_that_hides_nothing_is_accepted(config: dict[str, Any]) -> None:
    assert family_of(config, "here").model_type == config["model_type"]


def test_a_refused_architecture_learns_what_is_supported() -> None:
    with pytest.raises(UserError) as caught:
        family_of({"model_type": "bert"}, "x")
    assert all(family.architecture in str(caught.value) for family in FAMILIES.values())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_without_the_size_of_a_head_has_that_of_transformers(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 64}
    config = AutoConfig.for_model(model_type, **sizes, num_attention_heads=4, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    values = {name: value for name, value in config.to_dict().items() if name != "head_dim"}
    shapes = ModelConfig.parse(values, "here").linears
    assert shapes["q"] == tuple(model.get_submodule(f"{LAYERS}.0.self_attn.q_proj").weight.shape)
