"""Moments of linears, and the fraction of the residual stream that attention and MLP write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuronmm.compression.moments import gathering, moments_of, weighing
from neuronmm.compression.streaming import run_layer
from neuronmm.models.families import TARGETS
from tiny_models import make_tiny


def test_linears_of_one_input_share_moments_and_others_get_those_of_their_smaller_side() -> None:
    layer = make_tiny("qwen2").model.layers[0]
    weights = {name: layer.get_submodule(name) for name in TARGETS["all"]}
    assert weights["self_attn.q_proj"].bias is not None  # it must not enter the outputs' moments
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in TARGETS["all"]}
    for name, linear in weights.items():
        linear.register_forward_pre_hook(lambda _, inputs, keep=seen[name]: keep.append(inputs[0]))
    with torch.no_grad(), gathering(layer, TARGETS["all"], 1e-3) as moments:
        for x in torch.randn(3, 2, 5, 32):
            layer.mlp(x)
            layer.self_attn(x, position_embeddings=(torch.ones(1, 5, 8), torch.zeros(1, 5, 8)), attention_mask=None)
    q, k, v, o, gate, up, down = (moments[name] for name in TARGETS["all"])
    assert q is k and k is v and gate is up and gate is not q and q.of_inputs and gate.of_inputs
    assert not down.of_inputs and not o.of_inputs
    for name, inputs in seen.items():
        x = torch.cat([one.flatten(0, -2) for one in inputs]).double()
        y = x if moments[name].of_inputs else x @ weights[name].weight.detach().double().T
        torch.testing.assert_close(moments[name].gram, y.T @ y, rtol=1e-4, atol=1e-3)
        expected = 1e-3 * float((x.T @ x).diagonal().mean())
        torch.testing.assert_close(moments[name].damping, expected, rtol=1e-5, atol=0)


def test_autocast_does_not_affect_the_matmuls() -> None:
    layer = nn.ModuleDict({"a": nn.Linear(8, 9)})
    x = torch.randn(64, 8) + 100
    with torch.autocast("cpu", dtype=torch.bfloat16), gathering(layer, ["a"], 1e-3) as moments:
        layer["a"](x)
    torch.testing.assert_close(moments["a"].gram, x.double().T @ x.double(), rtol=1e-12, atol=0)


def test_the_hooks_of_the_moments_are_removed() -> None:
    layer = nn.ModuleDict({"a": nn.Linear(4, 4)})
    with gathering(layer, ["a"], 1e-3) as moments:
        layer["a"](torch.ones(1, 4))
    before = moments["a"].gram.clone()
    layer["a"](torch.ones(1, 4))
    assert torch.equal(moments["a"].gram, before)


def test_small_directions_survive_beside_a_massive_activation() -> None:
    layer = nn.ModuleDict({"a": nn.Linear(2, 3, bias=False)})
    x = torch.tensor([[1e4, 1e-2], [1e4, -1e-2]])
    with gathering(layer, ["a"], 1e-3) as moments:
        layer["a"](x)
    torch.testing.assert_close(moments["a"].gram[1, 1].item(), 2e-4, rtol=1e-6, atol=0)
    assert moments["a"].gram[0, 1].abs() < 1e-9


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_fraction_is_the_median_over_the_tokens(family: str) -> None:
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
    expected = [(part.square().sum(-1) / stream).median().double() for part in (attention, mlp)]
    with weighing(layer) as fractions:
        for row in hidden:
            run_layer(layer, row[None], rotary)
    torch.testing.assert_close([fractions["self_attn"], fractions["mlp"]], expected, rtol=1e-4, atol=0)
    moments, _ = moments_of(layer, hidden, rotary, TARGETS["all"], 1e-3)
    for name, sums in moments.items():
        torch.testing.assert_close(sums.fraction, fractions[name.partition(".")[0]], rtol=1e-5, atol=0)


def test_the_hooks_of_the_fractions_are_removed() -> None:
    model = make_tiny().model
    layer, hidden = model.layers[0], torch.randn(1, 4, 32)
    rotary = model.rotary_emb(hidden, torch.arange(4)[None])
    with weighing(layer) as fractions:
        run_layer(layer, hidden, rotary)
    before = dict(fractions)
    run_layer(layer, hidden * 2, rotary)
    assert fractions == before and not layer._forward_hooks and not layer.post_attention_layernorm._forward_pre_hooks
