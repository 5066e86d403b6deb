"""What a half of a layer writes beside the residual stream."""

from __future__ import annotations

import pytest
import torch

from neuronmm.compression.block import moments_of
from neuronmm.compression.stream import weighing
from neuronmm.compression.streaming import run_layer
from neuronmm.models.families import TARGETS
from tiny_models import make_tiny


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_each_half_is_weighed_by_each_tokens_own_stream(family: str) -> None:
    torch.manual_seed(0)
    model = make_tiny(family).model
    layer = model.layers[0].requires_grad_(False)
    hidden = torch.randn(3, 5, 32)
    hidden[0, 0] *= 1e4  # a massive token is one of fifteen
    rotary = model.rotary_emb(hidden, torch.arange(5)[None])
    normed = layer.input_layernorm(hidden)
    mask = torch.full((5, 5), -torch.inf).triu(1)[None, None]
    attention = layer.self_attn(normed, position_embeddings=rotary, attention_mask=mask)[0]
    between = hidden + attention
    mlp = layer.mlp(layer.post_attention_layernorm(between))
    stream = (between + mlp).square().sum(-1)
    wanted = [(part.square().sum(-1) / stream).median() for part in (attention, mlp)]
    with weighing(layer) as shares:
        for row in hidden:
            run_layer(layer, row[None], rotary)
    torch.testing.assert_close(
        [shares["self_attn"], shares["mlp"]], [one.double() for one in wanted], rtol=1e-4, atol=0
    )
    moments, _ = moments_of(layer, hidden, rotary, TARGETS["all"], 1e-3)
    for name, one in moments.items():
        torch.testing.assert_close(one.share, shares[name.partition(".")[0]], rtol=1e-5, atol=0)


def test_the_hooks_are_gone_afterwards() -> None:
    model = make_tiny().model
    layer, hidden = model.layers[0], torch.randn(1, 4, 32)
    rotary = model.rotary_emb(hidden, torch.arange(4)[None])
    with weighing(layer) as shares:
        run_layer(layer, hidden, rotary)
    before = dict(shares)
    run_layer(layer, hidden * 2, rotary)
    assert shares == before and not layer._forward_hooks and not layer.post_attention_layernorm._forward_pre_hooks
