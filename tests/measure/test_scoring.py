"""Sequences packed behind their common prefix get the scores that each gets alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draws import examples
from neuronmm.measure import tasks
from neuronmm.measure.scoring import lay_out, pack
from neuronmm.measure.tasks import Choice, score
from tiny_models import make_tiny

TOKENS = st.integers(3, 63)
SEQUENCES = st.tuples(
    st.lists(TOKENS, max_size=12), st.lists(st.lists(TOKENS, min_size=2, max_size=12), min_size=1, max_size=5)
).map(lambda drawn: [drawn[0] + rest for rest in drawn[1]])
MODELS = {kind: make_tiny(kind) for kind in ("llama", "qwen2")}


def alone(model: Any, choice: Choice) -> float:
    """Return the log-likelihood of a choice's scored tokens, from one plain forward pass over that choice only."""
    with torch.no_grad():
        logs = model(torch.tensor([choice.ids])).logits[0].double().log_softmax(-1)
    first = len(choice.ids) - choice.scored
    return sum(logs[i - 1, choice.ids[i]].item() for i in range(first, len(choice.ids)))


@given(SEQUENCES, st.integers(2, 40))
def test_a_row_holds_each_sequence_at_its_own_positions(sequences: list[list[int]], limit: int) -> None:
    rows = list(pack(sequences, limit))
    paths = [(row, path) for row in rows for path in row.paths]
    assert [[row.ids[i] for i in path] for row, path in paths] == sequences
    for row, path in paths:
        assert [row.positions[i] for i in path] == list(range(len(path)))
    for row in rows:
        assert len(row.ids) <= limit or len(row.paths) == 1
        assert len(row.ids) == len(row.positions) == len(row.branches) == len({i for path in row.paths for i in path})


def test_a_row_holds_the_common_prefix_once() -> None:
    (row,) = pack([[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 9]], 100)
    assert row.ids == [5, 6, 7, 8, 9, 7, 9]
    assert row.positions == [0, 1, 2, 3, 2, 2, 3]
    assert row.branches == [0, 0, 1, 1, 2, 3, 3]


def test_a_token_attends_to_the_prefix_and_to_its_branch_up_to_itself() -> None:
    rows = [next(pack(sequences, 100)) for sequences in ([[5, 6, 7], [5, 8, 9]], [[4]])]
    ids, positions, mask = lay_out(rows, torch.device("cpu"), torch.bfloat16)
    assert ids.tolist() == [[5, 6, 7, 8, 9], [4, 0, 0, 0, 0]]
    assert positions.tolist() == [[0, 1, 2, 1, 2], [0, 0, 0, 0, 0]]
    assert mask.dtype == torch.bfloat16 and mask.shape == (2, 1, 5, 5) and len(mask.unique()) == 2
    assert [row.nonzero().flatten().tolist() for row in mask[0, 0] == 0] == [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4]]
    assert (
        mask[:, 0].diagonal(dim1=1, dim2=2) == 0
    ).all()  # padding attends to itself; with no visible token attention would return NaN


@pytest.mark.parametrize("kind", MODELS)
@examples(25)
@given(groups=st.lists(SEQUENCES, min_size=1, max_size=4), data=st.data())
def test_packed_scores_equal_the_scores_of_each_sequence_alone(
    kind: str, groups: list[list[list[int]]], data: st.DataObject
) -> None:
    choices = [[Choice(ids, data.draw(st.integers(1, len(ids) - 1))) for ids in group] for group in groups]
    fractions: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "_BATCH_TOKENS", data.draw(st.sampled_from([8, 48, 2048])))
        scores = score(MODELS[kind], choices, fractions.append)
    expected = [alone(MODELS[kind], choice) for group in choices for choice in group]
    assert scores == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert sum(fractions) == pytest.approx(1)


def test_in_bfloat16_packing_costs_no_accuracy() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(3, 64, (n,), generator=generator).tolist()  # noqa: E731
    groups = []
    for _ in range(20):
        prefix = draw(30)
        groups.append([Choice(prefix + draw(10), 10) for _ in range(4)])
    model = make_tiny()
    exact = torch.tensor([alone(model, choice) for group in groups for choice in group])
    half = model.to(torch.bfloat16)
    plain = torch.tensor([alone(half, choice) for group in groups for choice in group])
    packed = torch.tensor(score(half, groups, lambda _: None))
    assert (packed - exact).norm() <= 2 * (plain - exact).norm()
