"""The forms of a factorised linear: each is its expansion to two factors; forms that do not fit are refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from neuronmm.kernels import Form, KernelError, LowRank, Op, implementations, low_rank_linear, low_rank_swiglu
from neuronmm.kernels.cpu import core
from random_factors import LAYOUTS, doubled, make_factors, quantised

NAMES = [i.name for i in implementations(Op.LINEAR)]


def swiglu_parts(layouts: tuple[str, str, str], dtype: torch.dtype, shared: bool = False) -> list[LowRank]:
    """Gate, up and down of an MLP 24 -> 40 -> 24. ``shared``: gate and up have one A in common."""
    sizes, ranks = ((40, 24), (40, 24), (24, 40)), (8, 8 if shared else 12, 4)
    gate, up, down = (
        make_factors(*size, rank, True, dtype, layout) for size, rank, layout in zip(sizes, ranks, layouts, strict=True)
    )
    return [gate, up._replace(A=gate.A) if shared else up, down]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["auto", "naive"])
def test_gradients_are_those_of_the_expanded_factors(name: str, layout: str) -> None:
    parts = [
        part._replace(A=part.A.requires_grad_(), B=part.B.requires_grad_(), bias=part.bias.requires_grad_())
        for part in swiglu_parts((layout,) * 3, torch.float64)
    ]
    leaves, inputs = [t for part in parts for t in part[:3]], torch.randn(3, 24, dtype=torch.float64)
    grads = []
    for gate, up, down in (parts, [part.expanded() for part in parts]):
        x = low_rank_linear(low_rank_linear(inputs, *gate, impl=name), *down, impl=name)
        y = low_rank_swiglu(x, gate, up, down, impl=name)
        grads.append(torch.autograd.grad(y.square().sum(), leaves))
    assert all(grad.abs().sum() > 0 for grad in grads[0])
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", ["naive", "torch"])
@pytest.mark.parametrize("shared", [False, True], ids=["two P", "one P"])
@pytest.mark.parametrize("up", ["two", "rows"])
def test_an_mlp_of_pivoted_linears_is_its_expansion(name: str, shared: bool, up: str) -> None:
    gate, up_part, down = swiglu_parts(("rows", up, "columns"), torch.float64, shared)
    assert gate.shares_a(up_part) is shared
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    expected = low_rank_swiglu(x, *(part.expanded() for part in (gate, up_part, down)), impl="naive")
    torch.testing.assert_close(low_rank_swiglu(x, gate, up_part, down, impl=name), expected)


EDGES = {
    "one pivot": (7, 12, 1),
    "all rows but one are pivots": (7, 12, 6),
    "C is empty": (7, 12, 7),
    "D is empty": (12, 7, 7),
    "square, full": (9, 9, 9),
    "one by one": (1, 1, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", ["naive", "torch"])
def test_a_pivoted_linear_is_its_expansion(name: str, edge: str, layout: str) -> None:
    out, inner, rank = EDGES[edge]
    for first in range(out - min(rank, out) + 1) if layout == "rows" else (None,):
        factors = make_factors(out, inner, rank, True, torch.float64, layout, first)
        assert (factors.in_features, factors.out_features) == (inner, out)
        plain, x = factors.expanded(), torch.randn(5, inner, dtype=torch.float64)
        assert plain.form is Form.TWO
        matrix = plain.B @ plain.A
        torch.testing.assert_close(low_rank_linear(x, *factors, impl=name), x @ matrix.T + factors.bias)
        if factors.form is Form.ROWS:
            pivots = factors.pivots if isinstance(factors.pivots, Tensor) else torch.arange(first, first + factors.rank)
            assert torch.equal(matrix[pivots.long()], factors.A)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_an_int8_linear_is_its_expansion(name: str, layout: str) -> None:
    """The identity block is exact: only the stored factors are rounded."""
    (factors,) = quantised(make_factors(33, 40, 11, True, torch.float32, layout))
    x = torch.randn(3, 40)
    expected = low_rank_linear(x.double(), *doubled(factors.expanded()), impl="naive")
    torch.testing.assert_close(low_rank_linear(x, *factors, impl=name).double(), expected, rtol=1e-5, atol=1e-5)


def test_factors_are_shared_only_where_they_are_applied_alike() -> None:
    rows, columns = (make_factors(8, 8, 4, False, torch.float32, layout) for layout in ("rows", "columns"))
    plain = LowRank(rows.A, torch.randn(9, 4))
    assert rows.shares_a(plain) and plain.shares_a(rows) and columns.shares_a(columns)
    assert not columns.shares_a(LowRank(columns.A, torch.randn(9, 4)))
    assert not rows.shares_a(plain._replace(A=rows.A.clone()))


HOSTILE = {
    "decreasing": [0, 2, 1, 4, 5],
    "repeated": [0, 2, 2, 4, 5],
    "negative": [-1, 2, 3, 4, 5],
    "beyond the outputs": [0, 2, 3, 4, 12],
    "far beyond": [0, 2, 3, 4, 2**31 - 1],
    "far before": [-(2**31), 2, 3, 4, 5],
}


@pytest.mark.parametrize("pivots", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pivots_never_reach_the_core(pivots: list[int]) -> None:
    if core() is None:
        pytest.skip("the C++ core is not built")
    factors = make_factors(12, 8, 5, True, torch.float32, "index")._replace(pivots=torch.tensor(pivots).int())
    with pytest.raises(KernelError, match=re.escape("strictly increasing, in [0, 12)")):
        low_rank_linear(torch.zeros(2, 8), *factors, impl="cpu")
    gate, up, down = swiglu_parts(("index",) * 3, torch.float32)
    for parts in (
        (gate._replace(pivots=gate.pivots.flip(0)), up, down),
        (gate, up._replace(pivots=up.pivots + 40), down),
        (gate, up, down._replace(pivots=down.pivots - 24)),
    ):
        with pytest.raises(KernelError, match="strictly increasing"):
            low_rank_swiglu(torch.zeros(2, 24), *parts, impl="cpu")


ROWS, COLUMNS = (make_factors(12, 8, 5, True, torch.float32, layout) for layout in ("rows", "columns"))
MISFITS = {
    "the form rows needs pivots": ROWS._replace(pivots=None),
    "first pivot -1 is not in [0, 7]": ROWS._replace(pivots=-1),
    "first pivot 8 is not in [0, 7]": ROWS._replace(pivots=8),
    "pivots [5] of torch.int64, they have to be [5] of torch.int32": ROWS._replace(pivots=torch.arange(5)),
    "pivots [4] of torch.int32": ROWS._replace(pivots=torch.arange(4, dtype=torch.int32)),
    "pivots [1, 5] of torch.int32": ROWS._replace(pivots=torch.arange(5, dtype=torch.int32)[None]),
    "the form columns takes no pivots": COLUMNS._replace(pivots=0),
    "the form two takes no pivots": make_factors(12, 8, 5, True, torch.float32)._replace(pivots=0),
    "A [5, 8], B [7, 5], bias [12] do not fit": ROWS._replace(form=Form.TWO),
    "A [5, 8], B [7, 5], bias [12] in the form columns do not fit": ROWS._replace(form=Form.COLUMNS),
    "A [5, 3], B [12, 5], bias [12] in the form rows do not fit": COLUMNS._replace(form=Form.ROWS, pivots=0),
    "B [12, 4], bias [12] in the form columns do not fit": COLUMNS._replace(B=torch.zeros(12, 4)),
}


@pytest.mark.parametrize("name", ["auto", *NAMES])
@pytest.mark.parametrize("message", MISFITS)
def test_forms_that_do_not_fit_never_reach_a_kernel(message: str, name: str) -> None:
    with pytest.raises(KernelError, match=re.escape(message)):
        low_rank_linear(torch.zeros(2, 8), *MISFITS[message], impl=name)
