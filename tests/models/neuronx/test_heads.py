"""Heads over cores: every head once, every query with its key, no more than needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from neuronmm.models.neuronx.heads import HeadPlan, distribute, distribute_as_nxd, take_heads

sizes = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 16))


@pytest.mark.parametrize("spread", [distribute, distribute_as_nxd])
@given(drawn=sizes)
def test_every_query_once_and_with_its_key(
    spread: Callable[[int, int, int], HeadPlan], drawn: tuple[int, int, int]
) -> None:
    kv_heads, group, cores = drawn
    heads = kv_heads * group
    assume(spread is distribute or heads >= cores)
    plan = spread(heads, kv_heads, cores)
    assert len(plan.queries) == len(plan.keys) == cores
    assert {len(mine) for mine in plan.queries} == {plan.queries_per_core}
    assert {len(mine) for mine in plan.keys} == {plan.keys_per_core}
    assert sorted(h for mine in plan.queries for h in mine if h is not None) == list(range(heads))
    repeats = plan.queries_per_core // plan.keys_per_core
    assert repeats * plan.keys_per_core == plan.queries_per_core
    for queries, keys in zip(plan.queries, plan.keys, strict=True):
        for slot, head in enumerate(queries):
            if head is not None:
                assert keys[slot // repeats] == head // group


def test_no_head_is_added_where_they_divide() -> None:
    plan = distribute(32, 8, 4)
    assert (plan.queries_per_core, plan.keys_per_core) == (8, 2)
    one_key_per_core = distribute(32, 2, 8)
    assert (one_key_per_core.queries_per_core, one_key_per_core.keys_per_core) == (4, 1)


def test_uneven_heads_are_padded_by_the_group_not_repeated() -> None:
    plan = distribute(9, 3, 2)
    assert plan.queries == ((0, 1, 2, 3, 4, 5), (6, 7, 8, None, None, None))
    assert plan.keys == ((0, 1), (2, None))


def test_take_heads_cuts_whole_heads_and_pads_with_zeros() -> None:
    weight = torch.arange(12.0).view(6, 2)
    assert take_heads(weight, (2, None), 2, 0).tolist() == [[8, 9], [10, 11], [0, 0], [0, 0]]
    assert take_heads(weight, (1,), 1, 1).tolist() == weight[:, 1:].tolist()


def test_nxd_repeats_key_heads_and_pads_each_group() -> None:
    """As in NxD's own comments: 7 query heads on 4 cores; and, where nothing divides, one key head per query head."""
    plan = distribute_as_nxd(7, 1, 4)
    assert plan.keys == ((0,), (0,), (0,), (0,)) and plan.queries == ((0, 1), (2, 3), (4, 5), (6, None))
    plan = distribute_as_nxd(6, 2, 4)
    assert plan.keys == ((0,), (0,), (1,), (1,)) and plan.queries == ((0, 1), (2, None), (3, 4), (5, None))
    plan = distribute_as_nxd(9, 3, 2)
    assert plan.queries == ((0, 1, 2, 3, 4), (5, 6, 7, 8, None))
    assert plan.keys == ((0, 0, 0, 1, 1), (1, 2, 2, 2, None))
    assert distribute_as_nxd(8, 4, 2).keys == ((0, 1), (2, 3))
