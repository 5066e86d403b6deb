"""The loop of a continuous batch on fake slots: when rows join, and that each row equals a run of its own."""

from __future__ import annotations

import torch

from fake_slots import FakeSlots, row
from neuronmm.engine import continuous
from neuronmm.engine.loop import Row
from neuronmm.engine.sampling import SamplingParams


def generate(slots: FakeSlots, rows: list[Row], params: SamplingParams, eos: frozenset[int] = frozenset()) -> list[Row]:
    """Generate, and return the row of each piece of text in order."""
    order = [row for row, _ in continuous.run(slots, rows, params, eos, torch.device("cpu"))]
    assert all(row.result.finish_reason for row in rows)
    return order


def test_a_row_joins_when_another_has_ended() -> None:
    params = SamplingParams()
    rows = [row([3, 4, 5], 3, params), row([6], 5, params), row([7, 8], 1, params), row([9], 2, params)]
    slots = FakeSlots(2)
    generate(slots, rows, params)
    assert [len(row.result.token_ids) for row in rows] == [3, 5, 1, 2]
    assert slots.diary == [
        "join 0", "join 1", "step [0, 1]", "step [0, 1]", "join 0", "step [1]", "join 0", "step [1, 0]",
    ]  # fmt: skip


def test_every_row_is_what_it_is_alone() -> None:
    """With sampling and a repetition penalty, neither depends on the other rows."""
    params = SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.3)
    prompts = [([3, 4, 5], 9), ([6], 4), ([7, 8], 12), ([9, 10], 2), ([11], 7)]
    together = [row(*prompt, params, seed) for seed, prompt in enumerate(prompts)]
    generate(FakeSlots(2), together, params)
    for seed, prompt in enumerate(prompts):
        alone = row(*prompt, params, seed)
        generate(FakeSlots(1), [alone], params)
        assert together[seed].result.token_ids == alone.result.token_ids
        assert together[seed].result.text == alone.result.text


def test_an_end_of_sequence_frees_the_slot() -> None:
    params = SamplingParams()
    (free,) = [row([3], 6, params)]
    generate(FakeSlots(1), [free], params)
    end = free.result.token_ids[2]
    rows = [row([3], 6, params), row([4], 1, params)]
    slots = FakeSlots(1)
    generate(slots, rows, params, frozenset((end,)))
    assert (rows[0].result.finish_reason, rows[0].result.token_ids[-1]) == ("eos", end)
    assert slots.diary == ["join 0", "step [0]", "step [0]", "join 0"]
    assert rows[1].result.ttft > rows[0].result.ttft + rows[0].result.decode_seconds > 0
