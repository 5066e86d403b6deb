"""Steps of several tokens of one sequence: bit by bit those of one token, whatever the model and the processor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core_decoding import needs_core
from draws import examples
from few_bits import quantise_model
from neuronmm.engine.cpu_decoder import CpuDecoder, describe
from neuronmm.kernels import KernelError, quantise, quantise_int4
from neuronmm.kernels.cpu.library import MAX_BATCH
from neuronmm.kernels.low_bits import LowBits
from neuronmm.models.families import FAMILIES
from tiny_models import fill_tiny, make_tiny, make_tokens, pivoted_spec, shared_spec, vary_norms

pytestmark = needs_core

PROMPT = 5
KINDS = {"dense": None, "two": shared_spec(), "pivoted": pivoted_spec(), "int8": shared_spec(factors="int8")}
WIDE = {"hidden_size": 200, "intermediate_size": 330, "head_dim": 26, "initializer_range": 0.07}
"""Widths with several accumulators, and with tails."""


def make_model(model_type: str, kind: str, dtype: torch.dtype, **shape: float) -> torch.nn.Module:
    model = vary_norms(make_tiny(model_type, **shape))
    spec = KINDS[kind]
    if spec:
        fill_tiny(model, spec)
    return model.to(dtype)


def assert_equals_single_steps(
    model: torch.nn.Module, counts: list[int], of_linears: Callable[[Tensor], LowBits] | None = None
) -> None:
    """Steps of ``counts`` tokens give the logits and the cache of steps of one token; the prompts are the same."""
    tokens = make_tokens(1, PROMPT + sum(counts))
    prompt, later = tokens[:, :PROMPT], tokens[0, PROMPT:]
    weights = quantise_model(describe(model, tokens.shape[1]), of_linears) if of_linears else None
    single, several = (CpuDecoder(model, 1, tokens.shape[1], weights) for _ in range(2))
    for decoder in (single, several):
        decoder.prefill(prompt, torch.ones_like(prompt))
    expected = torch.cat([single.decode(token[None]) for token in later])
    assert torch.equal(torch.cat([several.verify(part) for part in later.split(counts)]), expected)
    caches = (torch.stack(decoder.cache.keys + decoder.cache.values) for decoder in (several, single))
    assert torch.equal(*caches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_count(model_type: str, kind: str, dtype: torch.dtype, threads: int) -> None:
    assert_equals_single_steps(make_model(model_type, kind, dtype), list(range(1, MAX_BATCH + 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"], ids=["biases", "none"])
def test_every_instruction_set(model_type: str, kind: str, dtype: torch.dtype, isa: str) -> None:
    assert_equals_single_steps(make_model(model_type, kind, dtype, **WIDE), list(range(1, MAX_BATCH + 1)))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["dense", "pivoted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("of_linears", [quantise, quantise_int4])
def test_a_whole_model_of_few_bits(kind: str, dtype: torch.dtype, of_linears: Callable[[Tensor], LowBits]) -> None:
    assert_equals_single_steps(make_model("qwen2", kind, dtype, **WIDE), [8, 1, 3, 2, 5], of_linears)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("heads", [4, 5, 7, 8, 9])
def test_any_number_of_heads_shares_a_kv_head(heads: int, dtype: torch.dtype, threads: int) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 134}
    assert_equals_single_steps(make_model("qwen2", "dense", dtype, **shape), [8, 1, 3, 2, 5])


@examples(20)
@given(st.data())
def test_any_width(data: st.DataObject) -> None:
    """Widths with tails in vectors and in the accumulators, and any number of heads, which threads share."""
    draw, heads = data.draw, data.draw(st.sampled_from([1, 3, 6]))
    shape = {
        "hidden_size": draw(st.integers(8, 300)),
        "intermediate_size": draw(st.integers(8, 300)),
        "head_dim": 2 * draw(st.integers(4, 40)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([1, heads])),
    }
    counts = draw(st.lists(st.integers(1, MAX_BATCH), min_size=1, max_size=5))
    assert_equals_single_steps(make_model("qwen2", "dense", torch.bfloat16, **shape), counts)


def test_a_rewound_decoder_forgets() -> None:
    """After a rejection, decoding goes on as if the rejected tokens had never been there."""
    model, tokens = make_model("llama", "two", torch.bfloat16), make_tokens(1, PROMPT + 4)
    prompt, later = tokens[:, :PROMPT], tokens[0, PROMPT:]
    decoder = CpuDecoder(model, 1, PROMPT + 8)
    decoder.prefill(prompt, torch.ones_like(prompt))
    expected = decoder.verify(later)
    decoder.rewind(PROMPT + 1)
    wrong = decoder.verify(later[1:].flip(0))
    assert not torch.equal(wrong[-1], expected[-1])
    decoder.rewind(PROMPT + 1)
    assert torch.equal(decoder.verify(later[1:]), expected[1:])


def test_rows_with_padding_are_verified_too() -> None:
    """The core itself takes several rows, up to 8 tokens in total."""
    model, ids = make_model("qwen2", "dense", torch.bfloat16), make_tokens(2, PROMPT + 4)
    prompt, mask = ids[:, :PROMPT], torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :3] = 0
    decoder = CpuDecoder(model, 2, PROMPT + 4)
    decoder.prefill(prompt, mask)
    expected = torch.stack([decoder.decode(token) for token in ids[:, PROMPT:].T], dim=1)
    step, starts = decoder._core_step, torch.tensor([0, 3], dtype=torch.int32)
    assert torch.equal(step.verify(ids[:, PROMPT:], PROMPT, starts), expected)


def test_what_does_not_fit_is_refused() -> None:
    decoder = CpuDecoder(make_model("llama", "dense", torch.float32), 1, 16)
    step, starts = decoder._core_step, torch.zeros(1, dtype=torch.int32)
    assert step.verify(torch.zeros(1, 2, dtype=torch.long), 0, starts).shape == (1, 2, 64)
    for count, slot, begin in ((9, 0, 0), (0, 0, 0), (4, 13, 0), (4, 3, 4), (2, -1, 0)):
        with pytest.raises(KernelError):
            step.verify(torch.zeros(1, count, dtype=torch.long), slot, starts + begin)
    with pytest.raises(KernelError):
        step.verify(torch.full((1, 2), 64), 0, starts)
    with pytest.raises(ValueError, match="do not fit"):
        decoder.verify(torch.zeros(17, dtype=torch.long))
