"""Sampling: reproducible by seed, equal to transformers' filters, with checked parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TopPLogitsWarper

from draws import examples
from neuronmm.engine.engine import load
from neuronmm.engine.sampling import MIN_DIVISOR, Sampler, SamplingParams, TopP
from neuronmm.models import UserError
from tiny_models import load_plain

PROMPTS = ["w7 w8", "w20 w21 w22 w23", "w30"]


def test_seed_makes_a_batch_reproducible_and_rows_independent(checkpoint: Callable[..., Path]) -> None:
    engine = load(checkpoint(), dtype="fp32")
    params = SamplingParams(max_new_tokens=20, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)
    first = [r.token_ids for r in engine.generate(PROMPTS, params)]
    assert [r.token_ids for r in engine.generate(PROMPTS, params)] == first
    assert engine.generate(PROMPTS[:1], params)[0].token_ids == first[0]
    others = SamplingParams(max_new_tokens=20, temperature=0.9, top_p=0.95, seed=6, ignore_eos=True)
    assert engine.generate(PROMPTS[1:2], others)[0].token_ids == first[1], "row i draws with seed + i"
    same = engine.generate([PROMPTS[0]] * 2, params)
    assert same[0].token_ids != same[1].token_ids


def test_filters_leave_only_what_they_keep() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]])
    seen = torch.tensor([[0]])

    def drawn(**changes: Any) -> set[int]:
        sampler = Sampler(SamplingParams(temperature=5.0, **changes), [3], torch.device("cpu"))
        return {int(sampler(seen, logits)) for _ in range(200)}

    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.3) == {0, 1}
    assert drawn(top_p=1e-300) == {0}
    greedy = Sampler(SamplingParams(), [0], torch.device("cpu"))
    assert int(greedy(seen, logits)) == 0
    penalised = Sampler(SamplingParams(repetition_penalty=2.0), [0], torch.device("cpu"))
    assert int(penalised(seen, logits)) == 1


@examples(30)
@given(st.integers(0, 999), st.floats(0.01, 0.999), st.sampled_from([0.1, 1.0, 5.0]), st.sampled_from([5, 700, 3000]))
def test_top_p_keeps_what_transformers_keeps(seed: int, top_p: float, scale: float, vocabulary: int) -> None:
    """With flat logits the nucleus is larger than the tokens that are looked at first."""
    logits = scale * torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(seed))
    seen = torch.zeros(2, 1, dtype=torch.long)
    assert torch.equal(TopP(top_p)(seen, logits), TopPLogitsWarper(top_p)(seen, logits))


def test_logits_that_the_temperature_makes_infinite_are_refused() -> None:
    sampler = Sampler(SamplingParams(temperature=MIN_DIVISOR), [0], torch.device("cpu"))
    with pytest.raises(UserError, match="NaN"):
        sampler(torch.tensor([[0]]), torch.tensor([[3e38, 0.0]]))


def test_draws_have_the_probabilities_of_the_logits() -> None:
    """Within five standard deviations; a token of probability 0 is never drawn, not even at the ends."""
    logits = torch.tensor([[-torch.inf, 1.0, 0.0, -torch.inf, 2.0, -1.0, -torch.inf]])
    sampler, count = Sampler(SamplingParams(temperature=1.0), [3], torch.device("cpu")), 4000
    drawn = torch.stack([sampler(torch.tensor([[0]]), logits)[0] for _ in range(count)]).bincount(minlength=7)
    expected = logits.softmax(-1)[0]
    assert ((drawn / count - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()


@pytest.mark.parametrize("drawn", [0.0, 1 - 2**-24])
def test_the_ends_of_the_random_numbers_draw_a_possible_token(monkeypatch: pytest.MonkeyPatch, drawn: float) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 0.0, -torch.inf]])
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor([drawn]))
    sampler = Sampler(SamplingParams(temperature=1.0), [3], torch.device("cpu"))
    assert int(sampler(torch.tensor([[0]]), logits)) == (1 if drawn else 2)


def test_repetition_penalty_equals_transformers_and_ignores_padding(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    engine, model = load(folder, dtype="fp32"), load_plain(folder)
    model.generation_config.eos_token_id = None
    params = SamplingParams(max_new_tokens=24, repetition_penalty=1.7, ignore_eos=True)
    for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
        ids = torch.tensor([engine.encode(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, repetition_penalty=1.7
        )
        assert result.token_ids == out[0, ids.shape[1] :].tolist()


def test_the_least_temperature_and_penalty_draw_from_large_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 9e3, 0.0]])
    for penalty in (MIN_DIVISOR, 1 / MIN_DIVISOR):
        sampler = Sampler(SamplingParams(temperature=MIN_DIVISOR, repetition_penalty=penalty), [3], torch.device("cpu"))
        assert int(sampler(torch.tensor([[0]]), logits)) == (0 if penalty < 1 else 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-40},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": float("inf")},
        {"seed": -1},
        {"stop": ("",)},
        {"stop": "word"},
    ],
)
def test_values_out_of_range_are_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UserError, match=name):
        SamplingParams(**wrong)
