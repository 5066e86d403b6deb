"""The supported families, and the refusal of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from neuronmm.models import FAMILIES, UserError, family_of
from neuronmm.models.families import LAYERS, TARGETS
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
        ({}, "model_type None is not supported"),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "'gelu'; only silu"),
    ],
)
def test_a_refusal_says_what_and_where_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        family_of(config, "some/config.json")
    assert str(caught.value).startswith("some/config.json: ") and "\n" not in str(caught.value)


def test_a_refused_architecture_learns_what_is_supported() -> None:
    with pytest.raises(UserError) as caught:
        family_of({"model_type": "bert"}, "x")
    assert all(family.architecture in str(caught.value) for family in FAMILIES.values())
