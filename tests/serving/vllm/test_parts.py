"""The parts of tensor-parallel ranks add up to the whole linear; needs no vLLM."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draws import examples
from neuronmm.kernels import LowRank, low_rank_linear
from neuronmm.models import CompressionSpec, UserError
from neuronmm.serving.vllm.parts import Part, Split
from random_factors import LAYOUTS, make_factors, quantised
from tiny_models import make_spec

NAME = "model.layers.0.self_attn.q_proj"


def whole(factors: LowRank, x: torch.Tensor) -> torch.Tensor:
    return low_rank_linear(x, *factors, impl="naive")


@examples(60)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from([1, 2, 4]),
    *(st.integers(1, 5), st.integers(1, 5), st.integers(1, 20)),
    *(st.booleans(), st.booleans()),
)
def test_the_parts_of_all_ranks_make_the_whole(
    layout: str, count: int, outputs: int, inputs: int, rank: int, int8: bool, by_inputs: bool
) -> None:
    factors = make_factors(outputs * count, inputs * count, rank, False, torch.float32, layout)
    if int8:
        (factors,) = quantised(factors)
    x = torch.randn(3, inputs * count)
    parts = [Split(i, count, by_inputs).of_factors(factors, torch.float32) for i in range(count)]
    if by_inputs:
        y = sum(whole(part, piece) for part, piece in zip(parts, x.chunk(count, 1), strict=True))
    else:
        y = torch.cat([whole(part, x) for part in parts], 1)
    torch.testing.assert_close(y, whole(factors, x), rtol=1e-4, atol=1e-4)


def spec_of(layout: str, rank: int) -> CompressionSpec:
    if layout == "two":
        return make_spec({NAME: rank})
    form = {"form": "columns"} if layout == "columns" else {"form": "rows", "first": 3 if layout == "rows" else None}
    return make_spec({NAME: rank}, forms={NAME: form}, format=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_takes_the_tensors_of_its_linear_and_no_others(layout: str) -> None:
    factors = make_factors(24, 16, 4, False, torch.float32, layout, pivots=3)
    part = Part(NAME, spec_of(layout, 4), 16, 24, Split(0, 1, False))
    part.take("A.weight", factors.A)
    assert not part.complete
    part.take("B.weight", factors.B)
    if layout == "index":
        assert not part.complete
        part.take("pivots", factors.pivots)
    assert part.complete
    part.build(None, torch.device("cpu"), torch.float32)
    x = torch.randn(2, 16)
    assert torch.equal(whole(part.factors, x), whole(factors, x))
    for name, tensor, message in (
        ("weight", torch.zeros(24, 16), "belongs to no part"),
        ("A.weight", torch.zeros(5, 16), r"has shape \[5, 16\], not \[4, "),
        ("A.weight_scale", torch.zeros(4), "belongs to no part"),
    ):
        with pytest.raises(UserError, match=f"{NAME}.{name} {message}"):
            part.take(name, tensor)


def test_pivots_that_are_no_outputs_are_refused() -> None:
    part = Part(NAME, spec_of("index", 4), 16, 24, Split(0, 1, False))
    for pivots in ([0, 2, 2, 3], [0, 1, 2, 24]):
        with pytest.raises(UserError, match="increasing numbers from 0 to 23"):
            part.take("pivots", torch.tensor(pivots, dtype=torch.int32))


def test_a_dense_linear_is_cut_along_either_dimension() -> None:
    weight = torch.randn(8, 6)
    assert torch.equal(Split(1, 2, False).of_dense(weight), weight[4:])
    assert torch.equal(Split(1, 2, True).of_dense(weight), weight[:, 3:])
