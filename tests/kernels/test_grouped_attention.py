"""Attention whose query heads read keys and values together: its values, and which calls are changed."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draws import examples
from error_rule import assert_twice_plain, draws_to_pool
from neuronmm.kernels.grouped_attention import grouped_attention
from neuronmm.kernels.replaced import Replaced


def draw(
    rows: int,
    heads: int,
    group: int,
    keys: int,
    head: int,
    *,
    queries: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads * group, queries), (heads, keys), (heads, keys)
    query, key, value = (torch.randn(rows, *shape, head, generator=generator).to(dtype) for shape in shapes)
    return query, key, value


@examples(60)
@given(
    rows=st.integers(1, 5),
    heads=st.integers(1, 4),
    group=st.integers(1, 6),
    keys=st.integers(1, 70),
    head=st.sampled_from([1, 8, 20, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([None, 0.3]),
)
def test_it_is_the_attention_of_every_query_head(
    rows: int, heads: int, group: int, keys: int, head: int, dtype: torch.dtype, scale: float | None
) -> None:
    def attend(case: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return scaled_dot_product_attention(*case, scale=scale, enable_gqa=True)

    def grouped(case: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        with grouped_attention():
            return attend(case)

    def exact(case: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        query, key, value = case
        return attend((query.double(), key.double(), value.double()))

    count = draws_to_pool(rows * heads * group * head)
    cases = [draw(rows, heads, group, keys, head, dtype=dtype, seed=seed) for seed in range(count)]
    assert_twice_plain(cases, grouped, attend, exact)


@pytest.mark.parametrize(
    ("queries", "options", "grouped"),
    [
        (1, {"enable_gqa": True}, True),
        (2, {"enable_gqa": True}, False),
        (1, {"enable_gqa": True, "attn_mask": torch.ones(1, 9, dtype=torch.bool)}, False),
        (1, {"enable_gqa": True, "is_causal": True}, False),
    ],
)
def test_it_acts_on_one_query_and_leaves_other_calls_as_they_are(
    queries: int, options: dict[str, Any], grouped: bool
) -> None:
    query, key, value = draw(2, 3, 3, 9, 8, queries=queries)
    plain = scaled_dot_product_attention(query, key, value, **options)
    reached = Mock(wraps=scaled_dot_product_attention)
    with Replaced(scaled_dot_product_attention, reached), grouped_attention():
        got = scaled_dot_product_attention(query, key, value, **options)
    assert [call.args[0].shape[-2] == 3 for call in reached.call_args_list] == [grouped]
    torch.testing.assert_close(got, plain)


@pytest.mark.parametrize("of_query", [(1, 3, 2, 8), (2, 1, 2, 8)])
def test_queries_that_torch_broadcasts_are_left_to_it(of_query: tuple[int, ...]) -> None:
    query, key = torch.randn(of_query), torch.randn(2, 3, 9, 8)
    plain = scaled_dot_product_attention(query, key, key)
    with grouped_attention():
        assert torch.equal(scaled_dot_product_attention(query, key, key), plain)
