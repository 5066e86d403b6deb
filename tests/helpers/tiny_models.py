"""Tiny random models and compressed checkpoints, shared by the tests of all folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

import neuronmm
from neuronmm.kernels import Form
from neuronmm.kernels.fp8 import quantise_fp8
from neuronmm.kernels.low_bits import dense, quantise, quantise_int4
from neuronmm.models import CompressionSpec, Int8Linear, LowRankLinear
from neuronmm.models.families import LAYERS, TARGETS
from neuronmm.models.fp8 import Fp8Linear
from neuronmm.models.load import DTYPE
from neuronmm.models.low_bits import LowBitsModule
from neuronmm.models.patch import patch

LAYER_COUNT = 2
RANKS = {"mlp.gate_proj": 12, "mlp.up_proj": 16, "mlp.down_proj": 8, "self_attn.q_proj": 8, "self_attn.k_proj": 4}
"""The ranks of the linears that tests factorise; ``v_proj`` and ``o_proj`` stay dense."""
LEADERS = {
    "mlp.up_proj": "mlp.gate_proj",
    "self_attn.k_proj": "self_attn.q_proj",
    "self_attn.v_proj": "self_attn.q_proj",
}
"""Linear -> its leader, in a model with every possible shared A."""


def make_tiny(
    model_type: str = "llama",
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    vocabulary: int = 64,
    **shape: float,
) -> PreTrainedModel:
    """Create a random two-layer model in eval mode, with weights so large that greedy tokens depend on the prompt.

    ``shape`` overrides the sizes and the scale of the configuration.
    """
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYER_COUNT,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
        **shape,
    }
    config = AutoConfig.for_model(
        model_type,
        **sizes,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    # A later .to(dtype) would also round the rotary frequencies, which from_pretrained keeps in fp32.
    model = AutoModelForCausalLM.from_config(config, **{DTYPE: dtype}).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def vary_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Randomise the norm weights of ``model``, so that a test notices a lost one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1, 0.3)
    return model


def make_spec(ranks: dict[str, int], **changes: object) -> CompressionSpec:
    """Create a valid spec with these ranks and arbitrary figures."""
    block = {
        "ranks": ranks,
        "method": "svd",
        "targets": "mlp",
        "asked_ratio": 0.2,
        "realised_ratio": 0.19,
        "model_ratio": 0.1,
        "align": 4,
        "version": neuronmm.__version__,
    }
    return CompressionSpec.parse({**block, **changes}, "test")


def layer_ranks(linears: tuple[str, ...] = TARGETS["mlp"], layers: int = LAYER_COUNT) -> dict[str, int]:
    """Map the full name of the given linears in every layer to their ranks."""
    return {f"{LAYERS}.{i}.{linear}": RANKS[linear] for i in range(layers) for linear in linears}


def shared_spec(layers: int = LAYER_COUNT, **changes: object) -> CompressionSpec:
    """Create a spec where gate and up share an A, as do q, k and v; ``down_proj`` has its own, ``o_proj`` is dense."""
    shared = {
        f"{LAYERS}.{i}.{name}": f"{LAYERS}.{i}.{leader}" for i in range(layers) for name, leader in LEADERS.items()
    }
    ranks = layer_ranks((*TARGETS["mlp"], "self_attn.q_proj"), layers)
    return make_spec(ranks | {name: ranks[leader] for name, leader in shared.items()}, shared=shared, **changes)


def pivoted_spec(layers: int = LAYER_COUNT, *, shared: bool = False, **changes: object) -> CompressionSpec:
    """Every linear in a pivoted form, attention's with an index; or, ``shared``, those that are in no follower."""
    forms: dict[str, dict[str, object]] = {
        "mlp.gate_proj": {"form": "rows", "first": 5},
        "mlp.up_proj": {"form": "rows", "first": 9},
        "mlp.down_proj": {"form": "columns"},
        **{f"self_attn.{name}_proj": {"form": "rows"} for name in "qkvo"},
    }
    ranks = layer_ranks((*TARGETS["mlp"], "self_attn.q_proj", "self_attn.k_proj"), layers)
    ranks |= {f"{LAYERS}.{i}.self_attn.{name}_proj": rank for i in range(layers) for name, rank in (("v", 4), ("o", 6))}
    block = shared_spec(layers).model_dump() if shared else {"ranks": ranks, "shared": {}}
    ranks, followers = block["ranks"], block["shared"]
    named = {f"{LAYERS}.{i}.{name}": form for i in range(layers) for name, form in forms.items()}
    kept = {name: form for name, form in named.items() if name in ranks and name not in followers}
    return make_spec(ranks, shared=followers, forms=kept, format=2, **changes)


def compress_tiny(model: PreTrainedModel, ranks: dict[str, int]) -> CompressionSpec:
    """Patch ``model`` in place and fill each factor pair with the linear's truncated SVD."""
    return fill_tiny(model, make_spec(ranks))


def fill_tiny(model: PreTrainedModel, spec: CompressionSpec) -> CompressionSpec:
    """Patch ``model`` in place; A is from the linear's truncated SVD, B the least-squares fit."""
    linears = {name: model.get_submodule(name) for name in spec.ranks}
    patch(model, spec)
    for name in sorted(linears, key=lambda name: name in spec.shared):
        linear, low_rank = linears[name], model.get_submodule(name)
        assert isinstance(low_rank, LowRankLinear)
        u, s, vt = torch.linalg.svd(linear.weight.detach().float(), full_matrices=False)
        root = s[: low_rank.rank].sqrt()
        with torch.no_grad():
            if name in spec.shared:
                shared = dense(low_rank.factors.A, torch.float32).float()
                _fill(low_rank.B, linear.weight.float() @ torch.linalg.pinv(shared))
            elif low_rank.form is Form.TWO:
                _fill(low_rank.B, u[:, : low_rank.rank] * root)
                _fill(low_rank.A, root[:, None] * vt[: low_rank.rank])
            else:
                _fill_pivoted(low_rank, linear.weight.float())
            if linear.bias is not None:
                (low_rank if low_rank.form is Form.ROWS else low_rank.B).bias.copy_(linear.bias)
    return spec


def _fill_pivoted(low_rank: LowRankLinear, weight: torch.Tensor) -> None:
    """Fill a linear of the form ROWS with every third row from the second on, or the range that it has as pivots."""
    rank = low_rank.rank
    if low_rank.form is Form.COLUMNS:
        _fill(low_rank.B, weight[:, -rank:])
        _fill(low_rank.A, torch.linalg.pinv(weight[:, -rank:]) @ weight[:, :-rank])
        return
    if low_rank.first_pivot is None:
        low_rank.pivots.copy_(1 + 3 * torch.arange(rank))
    first = low_rank.first_pivot
    pivots = low_rank.pivots.long() if first is None else torch.arange(first, first + rank)
    others = torch.ones(len(weight), dtype=torch.bool).index_fill(0, pivots, False)
    _fill(low_rank.A, weight[pivots])
    _fill(low_rank.B, weight[others] @ torch.linalg.pinv(weight[pivots]))


def pivot_tiny(model: PreTrainedModel, leader: str = "gate") -> CompressionSpec:
    """Patch ``model`` in place with random factors in pivoted forms.

    Gate, up and down have ranges of pivots that overlap; in layer 1 gate and up share the A and the pivots of
    ``leader``. q has an index of pivots.
    """
    first, second = (f"{LAYERS}.{i}" for i in range(2))
    ranks = layer_ranks((*TARGETS["mlp"], "self_attn.q_proj")) | {f"{second}.mlp.up_proj": RANKS["mlp.gate_proj"]}
    forms: dict[str, dict[str, object]] = {
        f"{first}.mlp.gate_proj": {"form": "rows", "first": 30},
        f"{first}.mlp.up_proj": {"form": "rows", "first": 20},
        f"{second}.mlp.{leader}_proj": {"form": "rows", "first": 34},
    }
    forms |= {f"{layer}.mlp.down_proj": {"form": "columns"} for layer in (first, second)}
    forms |= {f"{layer}.self_attn.q_proj": {"form": "rows"} for layer in (first, second)}
    follower = {"gate": "up", "up": "gate"}[leader]
    shared = {f"{second}.mlp.{follower}_proj": f"{second}.mlp.{leader}_proj"}
    return _randomise(model, make_spec(ranks, shared=shared, forms=forms, format=2))


def pivot_high(model: PreTrainedModel, rank: int = 22) -> CompressionSpec:
    """Patch ``model`` in place with random pivoted factors, most of them of so high a rank that two have more weights.

    In layer 0 q, k and v share an A of ``rank``, down has the rank 30, up 12, and gate is dense. Layer 1 has an MLP of
    rank 30.
    """
    first, second = (f"{LAYERS}.{i}" for i in range(2))
    q, k, v = (f"{first}.self_attn.{name}_proj" for name in "qkv")
    up, downs = f"{first}.mlp.up_proj", [f"{layer}.mlp.down_proj" for layer in (first, second)]
    readers = [f"{second}.mlp.{name}_proj" for name in ("gate", "up")]
    ranks = {**dict.fromkeys((q, k, v), rank), up: 12, **dict.fromkeys((*downs, *readers), 30)}
    forms: dict[str, dict[str, object]] = {q: {"form": "rows"}, up: {"form": "rows", "first": 5}}
    forms |= {name: {"form": "columns"} for name in downs} | {name: {"form": "rows", "first": 0} for name in readers}
    return _randomise(model, make_spec(ranks, shared={k: q, v: q}, forms=forms, format=2))


def _randomise(model: PreTrainedModel, spec: CompressionSpec) -> CompressionSpec:
    """Patch ``model`` in place with random factors; an index of pivots has every other output, if they suffice."""
    patch(model, spec)
    with torch.no_grad():
        for name in spec.ranks:
            low_rank = model.get_submodule(name)
            assert isinstance(low_rank, LowRankLinear)
            for factor in [low_rank.B] if name in spec.shared else [low_rank.A, low_rank.B]:
                factor.weight.normal_(std=factor.weight.shape[1] ** -0.5)
            if low_rank.form is Form.ROWS and low_rank.first_pivot is None:
                step = min(2, low_rank.out_features // low_rank.rank)
                low_rank.pivots.copy_(torch.arange(0, step * low_rank.rank, step))
    return spec


def _fill(factor: torch.nn.Module, weight: torch.Tensor) -> None:
    if isinstance(factor, LowBitsModule):
        round_to = {Int8Linear: quantise, Fp8Linear: quantise_fp8}.get(type(factor), quantise_int4)
        weight, scales = round_to(weight)[:2]
        factor.weight_scale.copy_(scales)
    factor.weight.copy_(weight)


def write_checkpoint(model: PreTrainedModel, spec: CompressionSpec, folder: Path, **kwargs: object) -> Path:
    """Save a patched model in the checkpoint format: plain tensors, and the block inside config.json."""
    model.save_pretrained(folder, **kwargs)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": spec.model_dump()}))
    return folder


def load_plain(folder: Path, dtype: torch.dtype = torch.float32, **kwargs: object) -> PreTrainedModel:
    """Load with transformers' ``from_pretrained``; only the registered quantizer is ours."""
    return AutoModelForCausalLM.from_pretrained(folder, **{DTYPE: dtype}, **kwargs).eval()


def tiny_checkpoint(
    folder: Path,
    model_type: str = "llama",
    linears: tuple[str, ...] = TARGETS["mlp"],
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Write a compressed checkpoint to ``folder`` and return the patched model it was saved from."""
    model = make_tiny(model_type, tied=tied, dtype=dtype)
    spec = compress_tiny(model, layer_ranks(linears))
    write_checkpoint(model, spec, folder)
    return model


def make_tokens(batch: int = 2, length: int = 9) -> torch.Tensor:
    """Create token ids [batch, length] without special tokens."""
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(7))


def train_tiny(model: Any, steps: int = 3, learning_rate: float = 0.05) -> list[float]:
    """Train the parameters that require a gradient on :func:`make_tokens`; return the loss of every step."""
    tokens, losses = make_tokens(), []
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    for _ in range(steps):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def logits(model: Any) -> torch.Tensor:
    """Return the logits [batch, length, vocabulary] of a model for :func:`make_tokens`."""
    with torch.no_grad():
        return model(make_tokens()).logits


def specs_of(factors: str) -> dict[str, CompressionSpec]:
    """Return specs of a low-rank MLP and a low-rank q with factors of this dtype, with and without a shared A."""
    ranks = layer_ranks((*TARGETS["mlp"], "self_attn.q_proj"))
    return {"own A": make_spec(ranks, factors=factors), "shared A": shared_spec(factors=factors)}
