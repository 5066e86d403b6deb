"""``patch`` and ``fuse`` on models: what they replace, what they keep and what they refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from neuronmm.models import FAMILIES, LowRankLinear, LowRankSwiGLU, UserError, fuse
from neuronmm.models.families import TARGETS
from neuronmm.models.patch import patch
from tiny_models import compress_tiny, layer_ranks, make_spec, make_tiny, make_tokens


def low_rank_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, LowRankLinear)}


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_only_the_named_linears_are_swapped(model_type: str, tied: bool) -> None:
    model = make_tiny(model_type, tied=tied)
    ranks = layer_ranks(("mlp.gate_proj", "self_attn.q_proj"))
    others = {
        n: id(p) for n, p in model.named_parameters() if n.removesuffix(".weight").removesuffix(".bias") not in ranks
    }
    assert patch(model, make_spec(ranks)) is model
    assert low_rank_names(model) == set(ranks)
    assert {name: id(p) for name, p in model.named_parameters() if ".A." not in name and ".B." not in name} == others
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_the_qkv_bias_moves_to_b() -> None:
    model = make_tiny("qwen2")
    bias = model.model.layers[0].self_attn.q_proj.bias.detach().clone()
    compress_tiny(model, layer_ranks(("self_attn.q_proj",)))
    q_proj = model.model.layers[0].self_attn.q_proj
    assert q_proj.A.bias is None and torch.equal(q_proj.B.bias, bias)


@pytest.mark.parametrize("linears", [("mlp.gate_proj",), ("mlp.up_proj", "mlp.down_proj")])
def test_a_partly_compressed_mlp_keeps_its_module(linears: tuple[str, ...]) -> None:
    model = make_tiny()
    kind = type(model.model.layers[0].mlp)
    compress_tiny(model, layer_ranks(linears))
    assert all(type(layer.mlp) is kind for layer in model.model.layers)
    assert torch.isfinite(model(make_tokens()).logits).all()


def test_a_whole_mlp_becomes_one_module_that_computes_the_same() -> None:
    model = make_tiny()
    compress_tiny(model, layer_ranks())
    mlp = model.model.layers[1].mlp
    assert isinstance(mlp, LowRankSwiGLU)
    x = torch.randn(2, 32)
    plain = mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert torch.equal(mlp(x), plain)


def test_another_activation_is_not_turned_into_silu() -> None:
    model = make_tiny()
    config = copy.deepcopy(model.config)
    config.hidden_act = "gelu"
    gelu = AutoModelForCausalLM.from_config(config).eval()
    ranks = {name: 32 for name in layer_ranks()}
    tokens = make_tokens()
    expected = gelu(tokens).logits
    compress_tiny(gelu, ranks)
    assert torch.allclose(gelu(tokens).logits, expected, atol=1e-4)


def test_patch_keeps_device_dtype_and_mode() -> None:
    with torch.device("meta"):
        model = make_tiny(dtype=torch.bfloat16)
    patch(model, make_spec(layer_ranks(TARGETS["mlp"])))
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert not any(module.training for module in model.modules())


def test_two_specs_one_after_the_other() -> None:
    model = make_tiny()
    patch(model, make_spec(layer_ranks()))
    mlp = model.model.layers[0].mlp
    patch(model, make_spec(layer_ranks(("self_attn.k_proj",))))
    assert model.model.layers[0].mlp is mlp
    assert low_rank_names(model) == {*layer_ranks(), *layer_ranks(("self_attn.k_proj",))}


@pytest.mark.parametrize(
    ("name", "rank", "message"),
    [
        ("model.layers.7.mlp.up_proj", 4, "'model.layers.7.mlp.up_proj' is not in this LlamaForCausalLM"),
        ("model.layers.0.mlp.up", 4, "is not in this"),
        ("model.layers.0.mlp", 4, "is a LlamaMLP, not a dense linear"),
        ("model.layers.0.mlp.act_fn", 4, "not a dense linear"),
        ("", 4, "not a dense linear"),
        ("model.layers.0.mlp.up_proj", 33, "cannot have rank 33"),
    ],
)
def test_a_wrong_spec_is_refused_and_leaves_the_model_alone(name: str, rank: int, message: str) -> None:
    model = make_tiny()
    before = model.state_dict().keys()
    with pytest.raises(UserError, match=message) as caught:
        patch(model, make_spec({**layer_ranks(), name: rank}))
    assert "\n" not in str(caught.value)
    assert model.state_dict().keys() == before


def test_a_linear_is_compressed_only_once() -> None:
    model = make_tiny()
    compress_tiny(model, layer_ranks())
    with pytest.raises(UserError, match="is a LowRankLinear, not a dense linear"):
        patch(model, make_spec(layer_ranks()))


@pytest.mark.parametrize("impl", ["auto", "torch", "naive"])
def test_a_fused_model_gives_the_same_logits(impl: str) -> None:
    model = make_tiny("qwen2")
    compress_tiny(model, layer_ranks((*TARGETS["mlp"], "self_attn.q_proj")))
    tokens = make_tokens()
    with torch.no_grad():
        expected = model(tokens).logits
        assert torch.allclose(fuse(model, impl)(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert all(m.impl == impl for m in model.modules() if isinstance(m, (LowRankLinear, LowRankSwiGLU)))


def test_fuse_refuses_adapters_and_leaves_the_model_alone() -> None:
    model = make_tiny()
    compress_tiny(model, layer_ranks())
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["A"]))
    with pytest.raises(UserError, match="carries an adapter"):
        fuse(lora)
    assert all(m.impl is None for m in lora.modules() if isinstance(m, LowRankSwiGLU))
    fuse(lora.merge_and_unload())


def test_fuse_refuses_weights_that_are_not_there() -> None:
    with torch.device("meta"):
        model = make_tiny()
    patch(model, make_spec(layer_ranks()))
    with pytest.raises(UserError, match="no weights in memory"):
        fuse(model)
