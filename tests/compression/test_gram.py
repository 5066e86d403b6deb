"""Gram matrices gathered by hooks."""

from __future__ import annotations

import torch
from torch import nn

from neuronmm.compression.gram import gathering, leader
from neuronmm.models.families import TARGETS
from tiny import make_tiny


def test_each_linear_gets_the_gram_matrix_of_its_own_input() -> None:
    layer = make_tiny().model.layers[0]
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in TARGETS["all"]}
    for name in TARGETS["all"]:
        keep = seen[name]
        layer.get_submodule(name).register_forward_pre_hook(lambda _, inputs, keep=keep: keep.append(inputs[0]))
    with torch.no_grad(), gathering(layer, TARGETS["all"]) as grams:
        for x in torch.randn(3, 2, 5, 32):
            layer.mlp(x)
            layer.self_attn(x, position_embeddings=(torch.ones(1, 5, 8), torch.zeros(1, 5, 8)), attention_mask=None)
    assert set(grams) == {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"}
    for name, inputs in seen.items():
        x = torch.cat([one.flatten(0, -2) for one in inputs]).double()
        torch.testing.assert_close(grams[leader(name)].double(), x.T @ x, rtol=1e-5, atol=1e-4)


def test_autocast_does_not_reach_the_products() -> None:
    layer = nn.ModuleDict({"a": nn.Linear(8, 8)})
    x = torch.randn(64, 8) + 100
    with torch.autocast("cpu", dtype=torch.bfloat16), gathering(layer, ["a"]) as grams:
        layer["a"](x)
    assert grams["a"].dtype == torch.float32
    torch.testing.assert_close(grams["a"].double(), x.double().T @ x.double(), rtol=1e-6, atol=1e-2)


def test_the_hooks_are_gone_afterwards() -> None:
    layer = nn.ModuleDict({"a": nn.Linear(4, 4)})
    with gathering(layer, ["a"]) as grams:
        layer["a"](torch.ones(1, 4))
    before = grams["a"].clone()
    layer["a"](torch.ones(1, 4))
    assert torch.equal(grams["a"], before)
