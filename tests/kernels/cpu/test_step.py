"""The whole decode step against transformers and, linear by linear, against the torch decoder."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_decoding import (
    PROMPT,
    assert_decodes_within_the_rule,
    assert_equals_transformers,
    assert_reads_prompts,
    drawn,
    exact_logits,
    make_prompts,
    needs_core,
)
from draws import examples
from error_rule import draws_to_pool
from neuronmm.engine.cpu_decoder import CpuDecoder, refuses
from neuronmm.kernels import KernelError
from neuronmm.kernels.cpu import arena
from neuronmm.models.families import FAMILIES, TARGETS
from tiny_models import fill_tiny, layer_ranks, make_spec, make_tiny, shared_spec

pytestmark = needs_core

KINDS = {
    "dense": None,
    "mlp": make_spec(layer_ranks(TARGETS["mlp"])),
    "mixed": make_spec(layer_ranks(("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj"))),
    "shared": shared_spec(),
    "int8": shared_spec(factors="int8"),
}


def make_model(
    model_type: str, kind: str, *, tied: bool = False, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    model = make_tiny(model_type, tied=tied)
    if KINDS[kind]:
        fill_tiny(model, KINDS[kind])
    return model.to(dtype)


def twins(model_type: str, kind: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model in bf16, and the same model in fp32."""
    model, wide = make_model(model_type, kind, dtype=torch.bfloat16), make_model(model_type, kind)
    wide.load_state_dict(model.state_dict())
    return model, wide


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_equals_transformers_in_fp32(model_type: str, kind: str, tied: bool, threads: int) -> None:
    assert_equals_transformers(make_model(model_type, kind, tied=tied), batch=3)


@pytest.mark.parametrize("batch", range(1, 9))
def test_every_batch(batch: int) -> None:
    assert_equals_transformers(make_model("qwen3", "mixed"), batch)


def test_any_of_the_linears_may_lead_and_any_may_stay_out() -> None:
    """v leads k, up leads gate, q has an A of its own."""
    names = [f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.k_proj", "mlp.gate_proj")]
    leaders = [name.replace("k_proj", "v_proj").replace("gate_proj", "up_proj") for name in names]
    own = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    model = make_tiny("qwen2")
    fill_tiny(
        model, make_spec(dict.fromkeys((*names, *leaders, *own), 8), shared=dict(zip(names, leaders, strict=True)))
    )
    assert_equals_transformers(model, 2)


@pytest.mark.usefixtures("isa")
def test_every_instruction_set() -> None:
    assert_equals_transformers(make_model("llama", "mlp"), 2)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("heads", [1, 4, 5, 7, 8, 9])
def test_any_number_of_heads_shares_a_kv_head(heads: int, threads: int) -> None:
    """Heads that the registers take together and apart, of whole vectors and a tail."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 134}
    wide, model = make_tiny("qwen2", **shape), make_tiny("qwen2", **shape).to(torch.bfloat16)
    assert_equals_transformers(wide, batch=2)
    wide.load_state_dict(model.state_dict())
    assert_decodes_within_the_rule(model, wide)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_bf16_keeps_the_rule(model_type: str, kind: str) -> None:
    """In bf16 the error against fp32 is at most twice that of the torch decoder in bf16, over the same tokens."""
    assert_decodes_within_the_rule(*twins(model_type, kind))


@pytest.mark.parametrize("length", [2, 9, 70])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_keep_the_rule(kind: str, batch: int, length: int, threads: int) -> None:
    """Logits and cache of a prompt read by the core; 8 rows of 70 tokens are more than it takes at once."""
    assert_reads_prompts([twins("qwen3" if batch == 3 else "qwen2", kind)], batch, length)


@pytest.mark.parametrize("kind", ["dense", "shared", "int8"])
@pytest.mark.parametrize("length", [24, 300])
def test_prompts_keep_the_rule_on_every_instruction_set(kind: str, length: int, isa: str) -> None:
    """300 keys are more than a panel of fp32 takes of them at once."""
    reads = CpuDecoder(make_model("qwen2", kind, dtype=torch.bfloat16), 1, 4).reads_prompts
    assert reads is (isa != "portable")
    if reads:
        assert_reads_prompts([twins("qwen2", kind)], 2, length)


@pytest.mark.usefixtures("isa")
@examples(10)
@given(st.data())
def test_prompts_of_models_of_any_width(data: st.DataObject) -> None:
    """Widths with tails in panels, vectors and rows, and beyond what a panel of fp32 takes at once."""
    draw = data.draw
    heads, hidden = draw(st.sampled_from([1, 2, 6])), draw(st.integers(8, 700))
    shape = {
        "hidden_size": hidden,
        "intermediate_size": draw(st.integers(8, 700)),
        "head_dim": 2 * draw(st.integers(4, 40)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([1, heads])),
        "vocab_size": draw(st.integers(64, 200)),
        "initializer_range": hidden**-0.5,  # with the tiny models' own, wide ones attend to one position alone
    }
    batch, length = draw(st.integers(1, 3)), draw(st.integers(2, 40))

    def shaped_twins() -> tuple[torch.nn.Module, torch.nn.Module]:
        model, wide = make_tiny("qwen2", dtype=torch.bfloat16, **shape), make_tiny("qwen2", **shape)
        wide.load_state_dict(model.state_dict())
        return model, wide

    assert_reads_prompts(drawn(draws_to_pool(hidden * batch, 8), shaped_twins), batch, length)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("more", [1, 8, 9])
def test_no_step_of_a_long_prompt_is_so_short_that_it_rounds_otherwise(more: int) -> None:
    """The core takes 512 tokens per step; the logits are those of the same prompt in two parts of some 260."""
    ids = torch.randint(3, 64, (1, 512 + more))
    decoder = CpuDecoder(make_model("qwen2", "shared", dtype=torch.bfloat16), 1, 600)
    if not decoder.reads_prompts:
        pytest.skip("prompts are read by torch")
    whole = decoder.prefill(ids, torch.ones_like(ids))
    decoder.prefill(ids[:, :260], torch.ones(1, 260, dtype=torch.int64))
    assert torch.equal(decoder.extend(ids[:, 260:]), whole)


def test_a_prompt_in_fp32_is_read_by_torch() -> None:
    assert not CpuDecoder(make_model("llama", "dense"), 1, 16).reads_prompts


def test_a_decoder_is_reusable_and_full_at_the_end() -> None:
    model, (ids, mask) = make_model("llama", "dense"), make_prompts(2)
    decoder = CpuDecoder(model, 2, PROMPT + 1)
    token = decoder.prefill(ids, mask).argmax(-1)
    first = decoder.decode(token)
    with pytest.raises(ValueError, match="do not fit"):
        decoder.decode(token)
    assert torch.equal(decoder.prefill(ids, mask).argmax(-1), token)
    assert torch.equal(decoder.decode(token), first)


def test_the_arena_moves_weights_without_changing_a_result() -> None:
    model, (ids, mask) = make_model("qwen2", "mlp", tied=True), make_prompts(2)
    before = exact_logits(model, ids, mask)
    parameters = arena.gather(model.parameters())
    assert torch.equal(exact_logits(model, ids, mask), before)
    ends = [parameter.data_ptr() + parameter.nbytes for parameter in parameters]
    assert all(0 <= after.data_ptr() - end < 64 for after, end in zip(parameters[1:], ends[:-1], strict=True))
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1
    assert_equals_transformers(model, 2)


def test_a_decoder_keeps_the_weights_that_it_was_made_with() -> None:
    """Its addresses stay valid if the parameters get other memory later."""
    model, (ids, mask) = make_model("llama", "mixed"), make_prompts(1)
    decoder = CpuDecoder(model, 1, PROMPT + 1)
    token = decoder.prefill(ids, mask).argmax(-1)
    first = decoder.decode(token)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    junk = [torch.full(parameter.shape, torch.nan) for parameter in model.parameters() for _ in range(8)]
    decoder.prefill(ids, mask)
    assert junk and torch.equal(decoder.decode(token), first)


def test_scores_that_are_nan_stay_nan() -> None:
    """A softmax that clamps them would hide a fault of the weights."""
    model, (ids, mask) = make_model("llama", "dense"), make_prompts(1)
    decoder = CpuDecoder(model, 1, PROMPT + 1)
    token = decoder.prefill(ids, mask).argmax(-1)
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.q_proj.weight, torch.nan)
    assert decoder.decode(token).isnan().all()


def test_what_it_cannot_serve_is_refused() -> None:
    assert refuses(make_model("llama", "mlp"), 8) is None
    assert "9 rows" in (refuses(make_model("llama", "dense"), 9) or "")
    assert "float16" in (refuses(make_model("llama", "dense", dtype=torch.float16), 1) or "")
    model = make_model("llama", "dense")
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
    assert "up_proj is a Sequential" in (refuses(model, 1) or "")
    with pytest.raises(KernelError, match="batch 9"):
        CpuDecoder(make_model("llama", "dense"), 9, 16)


def test_wrong_arguments_are_refused_before_the_core_sees_them() -> None:
    decoder = CpuDecoder(make_model("llama", "dense"), 2, 16)
    starts = torch.zeros(2, dtype=torch.int32)
    assert decoder._core_step(torch.zeros(2, 1, dtype=torch.long), 0, starts).shape == (2, 64)
    for token_ids, slot, begin in (
        (torch.zeros(3, 1, dtype=torch.long), 0, starts),
        (torch.zeros(2, dtype=torch.long), 0, starts),
        (torch.zeros(2, 0, dtype=torch.long), 0, starts),
        (torch.zeros(2, 1, dtype=torch.int32), 0, starts),
        (torch.zeros(2, 1, dtype=torch.long), 16, starts),
        (torch.zeros(2, 1, dtype=torch.long), -1, starts),
        (torch.zeros(2, 1, dtype=torch.long), 3, starts + 4),
        (torch.full((2, 1), 64), 0, starts),
        (torch.full((2, 1), -1), 0, starts),
        (torch.zeros(2, 1, dtype=torch.long), 0, starts.long()),
        (torch.zeros(2, 2, dtype=torch.long), 0, starts),  # a prompt in fp32
    ):
        with pytest.raises(KernelError):
            decoder._core_step(token_ids, slot, begin)
