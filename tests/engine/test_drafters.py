"""The n-gram drafter against a search of the whole context, the model drafter's reading, the draft length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_decoding import needs_core
from draws import examples
from neuronmm.engine import drafters
from neuronmm.engine.cpu_decoder import CpuDecoder
from neuronmm.engine.draft_length import DraftLength, StepTimes
from neuronmm.engine.drafters import ModelDrafter, NgramDrafter
from tiny_models import make_tiny, make_tokens


def searched(context: list[int], count: int) -> list[int]:
    """The tokens after the last earlier occurrence of the longest suffix of 4, 3 or 2 tokens."""
    for size in (4, 3, 2):
        for end in range(len(context) - 1, size - 1, -1):
            if context[end - size : end] == context[-size:]:
                longer = list(context)
                for _ in range(count):
                    longer.append(longer[end + len(longer) - len(context)])
                return longer[len(context) :]
    return []


@examples(100)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.data())
def test_ngrams(tokens: list[int], data: st.DataObject) -> None:
    """A context that grows by any number of tokens between drafts."""
    drafter, length = NgramDrafter(), 0
    while length < len(tokens):
        length += data.draw(st.integers(1, len(tokens) - length))
        count = data.draw(st.integers(1, 7))
        assert drafter.propose(tokens[:length], count) == searched(tokens[:length], count)


def test_an_ngram_needs_two_tokens_seen_before() -> None:
    assert NgramDrafter().propose([5, 6, 7, 8, 6], 4) == []
    assert NgramDrafter().propose([5, 6, 7, 8, 5, 6], 4) == [7, 8, 5, 6]
    assert NgramDrafter().propose([9, 1, 1, 1], 3) == [1, 1, 1]


@needs_core
def test_a_model_drafter_reads_a_long_context_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make_tiny(), make_tokens(1, 40)[0].tolist()
    at_once, decoder = ModelDrafter(CpuDecoder(model, 1, 48), 1e-3, 64), CpuDecoder(model, 1, 48)
    expected = at_once.propose(tokens, 5)
    monkeypatch.setattr(drafters, "CHUNK", 12)
    drafter = ModelDrafter(decoder, 1e-3, 64)
    behind = [drafter.behind(tokens)]
    for grown, read in ((37, 12), (38, 24), (39, 36)):  # the context grows while it is read
        assert drafter.propose(tokens[:grown], 5) == [] and decoder.cache.length == read
        behind.append(drafter.behind(tokens))
    assert behind == sorted(behind, reverse=True) and behind[-1] == 0
    assert drafter.propose(tokens, 5) == expected and len(expected) == 5


def times(*seconds: float) -> StepTimes:
    """Steps of 1, 2, ... tokens that take so long."""
    measured = StepTimes()
    for tokens, value in enumerate(seconds, 1):
        measured.add(tokens, value)
    return measured


def after(seconds: StepTimes, right: int, wrong: int) -> DraftLength:
    length = DraftLength(seconds, 0.7)
    for accepted in [True] * right + [False] * wrong:
        length.record(accepted)
    return length


def test_the_length_follows_acceptance_and_cost() -> None:
    flat, steep = times(1, 1.01, 1.02, 1.03, 1.04), times(1, 2, 3, 4, 5)
    assert after(flat, 40, 0).choose(4, lambda n: 0) == 4
    assert after(flat, 40, 0).choose(2, lambda n: 0) == 2
    assert after(flat, 0, 200).choose(4, lambda n: 0) == 0
    assert after(steep, 40, 0).choose(4, lambda n: 0) == 0
    assert after(flat, 40, 0).choose(4, lambda n: n) == 0
    assert after(StepTimes(), 40, 0).choose(4, lambda n: 0) == 0
    assert after(flat, 40, 0).choose(0, lambda n: 0) == 0


def test_what_a_drafter_has_to_read_first_has_to_be_gained() -> None:
    """Four tokens per 1.04 s in place of one per second gain about 0.79 s a token."""
    length = after(times(1, 1.01, 1.02, 1.03, 1.04), 400, 0)
    assert length.choose(4, lambda n: 0, behind=70, left=100) == 4
    assert length.choose(4, lambda n: 0, behind=90, left=100) == 0
    assert length.choose(4, lambda n: 0, behind=70, left=50) == 0


def test_a_length_without_a_time_is_tried_and_a_stall_is_outlived() -> None:
    assert after(times(1, 1.1), 40, 0).choose(7, lambda n: 0) == 7
    stalled = times(1, 9, 1.1)
    assert stalled(2) == 1.1 and stalled(8) == 1.1
    for _ in range(5):
        stalled.add(1, 2.0)
    assert stalled(1) == 1.1


def test_a_length_that_did_not_pay_is_tried_again_a_thousand_steps_later() -> None:
    seconds = times(1, 9)
    length = after(seconds, 40, 0)
    for _ in range(999):
        seconds.add(1, 1.0)
    assert length.choose(1, lambda n: 0) == 0
    seconds.add(1, 1.0)
    assert length.choose(1, lambda n: 0) == 1
    for _ in range(1000):
        seconds.add(2, 1.1)
    assert seconds(1) is None and length.choose(1, lambda n: 0) == 0, "the time of a single step is measured anew"


@examples(100)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.lists(st.booleans(), max_size=60), st.floats(0, 2))
def test_no_length_is_chosen_that_is_predicted_to_lose(seconds: list[float], accepted: list[bool], cost: float) -> None:
    measured = times(*seconds)
    length = DraftLength(measured, 0.7)
    for value in accepted:
        length.record(value)

    def per_token(count: int) -> float:
        expected = sum(length.acceptance**i for i in range(count + 1))
        return ((measured(count + 1) or 0) + cost * count) / expected

    chosen = length.choose(7, lambda n: cost * n)
    assert per_token(chosen) <= min(map(per_token, range(8))) * (1 + 1e-9)


def test_a_new_sequence_begins_with_the_expected_share() -> None:
    """A step with a draft of one token takes 1.8 steps: it pays from a share of 0.8 on."""
    seconds = times(1, 1.1)
    assert DraftLength(seconds, 0.9).choose(1, lambda n: 0.7) == 1
    assert DraftLength(seconds, 0.7).choose(1, lambda n: 0.7) == 0
