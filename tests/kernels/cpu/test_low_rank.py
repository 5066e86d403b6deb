"""The C++ low-rank ops against the reference: shapes, tails, batches, threads, instruction sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core_decoding import needs_core
from draws import examples
from error_rule import POOL, assert_twice_plain, draws_to_pool
from neuronmm.kernels import KernelError, LowRank, low_rank_linear, low_rank_swiglu
from neuronmm.kernels.cpu.library import MAX_BATCH, MAX_OUTPUTS
from neuronmm.kernels.ops import Op, choose
from random_factors import LAYOUTS, doubled, make_factors

SIZES = st.integers(1, 130)
PIVOTED = LAYOUTS[1:]


Case = tuple[Tensor, Tensor, Tensor]
"""The core's result, plain torch's and the exact one."""


def assert_rule(cases: list[Case]) -> None:
    assert_twice_plain(cases, *(lambda case, part=part: case[part] for part in range(3)))


def check_linear(
    rows: int, inner: int, rank: int, out: int, bias: bool, dtype: torch.dtype, layout: str = "two"
) -> None:
    independent = rows * min(inner, rank, out)
    cases = [linear_case(rows, inner, rank, out, bias, dtype, layout) for _ in range(draws_to_pool(independent, POOL))]
    assert_rule(cases)


def linear_case(rows: int, inner: int, rank: int, out: int, bias: bool, dtype: torch.dtype, layout: str) -> Case:
    factors, x = make_factors(out, inner, rank, bias, dtype, layout), torch.randn(rows, inner).to(dtype)
    exact = low_rank_linear(x.double(), *doubled(factors), impl="naive")
    y, plain = (low_rank_linear(x, *factors, impl=impl) for impl in ("cpu", "naive"))
    return y, plain, exact


class Mlp(NamedTuple):
    """A SwiGLU call. ``ranks`` and ``layouts`` are gate's, up's and down's.

    ``shared``: up uses gate's A if it has its shape.
    """

    rows: int
    hidden: int
    ranks: tuple[int, int, int]
    inter: int
    bias: bool
    dtype: torch.dtype
    layouts: tuple[str, str, str] = ("two", "two", "two")
    shared: bool = False


def check_swiglu(mlp: Mlp) -> None:
    # What passes through the narrowest place shares its rounding.
    independent = mlp.rows * min(mlp.hidden, mlp.inter, *mlp.ranks)
    cases = [swiglu_case(mlp) for _ in range(draws_to_pool(independent, POOL))]
    assert_rule(cases)


def swiglu_case(mlp: Mlp) -> Case:
    rows, hidden, ranks, inter, bias, dtype, layouts, shared = mlp
    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    factors = [
        make_factors(*shape, rank, bias, dtype, layout)
        for shape, rank, layout in zip(shapes, ranks, layouts, strict=True)
    ]
    if shared and factors[0].A.shape == factors[1].A.shape:
        factors[1] = factors[1]._replace(A=factors[0].A)
    x = torch.randn(rows, hidden).to(dtype)
    exact = low_rank_swiglu(x.double(), *map(doubled, factors), impl="naive")
    y, plain = (low_rank_swiglu(x, *factors, impl=impl) for impl in ("cpu", "naive"))
    return y, plain, exact


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
class TestRule:
    """Every shape, at both thread counts and dtypes."""

    @pytest.fixture(autouse=True)
    def _threads(self, threads: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        yield
        torch.set_num_threads(before)

    @examples(40)
    @given(st.integers(1, MAX_BATCH), SIZES, SIZES, SIZES, st.booleans(), st.integers(0, 999))
    def test_linear(
        self, dtype: torch.dtype, rows: int, inner: int, rank: int, out: int, bias: bool, seed: int
    ) -> None:
        torch.manual_seed(seed)
        with torch.inference_mode():
            check_linear(rows, inner, rank, out, bias, dtype)

    @examples(40)
    @given(st.integers(1, MAX_BATCH), SIZES, st.tuples(SIZES, SIZES, SIZES), SIZES, st.booleans(), st.integers(0, 999))
    def test_swiglu(
        self,
        dtype: torch.dtype,
        rows: int,
        hidden: int,
        ranks: tuple[int, int, int],
        inter: int,
        bias: bool,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        with torch.inference_mode():
            check_swiglu(Mlp(rows, hidden, ranks, inter, bias, dtype))

    @examples(20)
    @given(
        *(st.integers(1, MAX_BATCH), SIZES, SIZES, SIZES, st.booleans(), st.integers(0, 999)), st.sampled_from(PIVOTED)
    )
    def test_pivoted_linear(
        self, dtype: torch.dtype, rows: int, inner: int, rank: int, out: int, bias: bool, seed: int, layout: str
    ) -> None:
        torch.manual_seed(seed)
        with torch.inference_mode():
            check_linear(rows, inner, rank, out, bias, dtype, layout)

    @examples(20)
    @given(st.data(), st.integers(0, 999))
    def test_pivoted_swiglu(self, dtype: torch.dtype, data: st.DataObject, seed: int) -> None:
        """Ranks reach and pass full rank; gate and up of one rank may share their A."""
        draw = data.draw
        rows, hidden, inter, rank, shared = (
            draw(drawn) for drawn in (st.integers(1, MAX_BATCH), SIZES, SIZES, SIZES, st.booleans())
        )
        layouts = draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 3))
        ranks = (rank, min(rank, hidden, inter) if shared else draw(SIZES), draw(SIZES))
        torch.manual_seed(seed)
        with torch.inference_mode():
            check_swiglu(Mlp(rows, hidden, ranks, inter, draw(st.booleans()), dtype, layouts, shared))


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", range(1, MAX_BATCH + 1))
@torch.inference_mode()
def test_every_instruction_set_and_batch(isa: str, rows: int, dtype: torch.dtype) -> None:
    check_linear(rows, 576, 77, 193, True, dtype)
    check_swiglu(Mlp(rows, 64, (16, 33, 7), 300, True, dtype))


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("layout", PIVOTED)
@torch.inference_mode()
def test_every_instruction_set_and_form(isa: str, layout: str, rows: int, dtype: torch.dtype) -> None:
    check_linear(rows, 576, 77, 193, True, dtype, layout)
    rows_of_gate = "index" if layout == "index" else "rows"
    for up in ("two", layout):
        layouts = (rows_of_gate, up, "columns")
        check_swiglu(Mlp(rows, 64, (33, 33, 50), 300, True, dtype, layouts, shared=up != "columns"))


@needs_core
@torch.inference_mode()
def test_a_row_does_not_depend_on_its_neighbours_beyond_summation_order() -> None:
    factors, x = make_factors(200, 576, 64, False, torch.float32), torch.randn(8, 576)
    together = low_rank_linear(x, *factors, impl="cpu")
    alone = torch.cat([low_rank_linear(row[None], *factors, impl="cpu") for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@needs_core
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_the_number_of_threads_changes_nothing(layout: str) -> None:
    before = torch.get_num_threads()
    factors, x = make_factors(2048, 512, 256, True, torch.bfloat16, layout), torch.randn(2, 512).bfloat16()
    results = []
    try:
        for threads in (1, 2, 3, 2, 3):
            torch.set_num_threads(threads)
            results.append(low_rank_linear(x, *factors, impl="cpu"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, results[0]) for y in results)


@needs_core
@torch.inference_mode()
def test_extreme_values_pass_through_silu() -> None:
    one = LowRank(torch.ones(1, 1), torch.ones(1, 1))
    x = torch.tensor([[-1e4], [-90.0], [0.0], [90.0], [1e4], [float("nan")]])
    expected = low_rank_swiglu(x, one, one, one, impl="reference")
    torch.testing.assert_close(low_rank_swiglu(x, one, one, one, impl="cpu"), expected, equal_nan=True)


@needs_core
@torch.inference_mode()
def test_leading_dimensions_and_strided_input() -> None:
    factors, x = make_factors(24, 16, 4, True, torch.bfloat16), torch.randn(2, 32, 3).to(torch.bfloat16)
    strided = x.transpose(1, 2)[..., ::2]
    expected = low_rank_linear(strided.contiguous().view(6, 16), *factors, impl="cpu").view(2, 3, 24)
    assert torch.equal(low_rank_linear(strided, *factors, impl="cpu"), expected)


@needs_core
@torch.inference_mode()
def test_no_outputs_are_an_empty_result() -> None:
    x, none = torch.randn(2, 8), LowRank(torch.randn(4, 8), torch.empty(0, 4))
    assert low_rank_linear(x, *none, impl="cpu").shape == (2, 0)
    down = LowRank(torch.empty(3, 0), torch.randn(8, 3), torch.randn(8))
    wider = LowRank(torch.randn(40, 8), torch.empty(0, 40))
    y = low_rank_swiglu(x, none, wider, down, impl="cpu")
    assert torch.equal(y, down.bias.expand(2, 8))


@needs_core
@pytest.mark.parametrize(
    ("reason", "x", "change"),
    [
        ("outputs are more than", torch.randn(1, 16), {"B": torch.empty(MAX_OUTPUTS + 1, 4)}),
        ("rows", torch.randn(MAX_BATCH + 1, 16), {}),
        ("rows", torch.randn(0, 16), {}),
        ("float32 or bfloat16", torch.randn(1, 16).half(), {}),
        ("the same for all", torch.randn(1, 16).bfloat16(), {}),
        ("not contiguous", torch.randn(1, 16), {"A": torch.randn(16, 4).T}),
        ("no backward", torch.randn(1, 16, requires_grad=True), {}),
        ("main memory", torch.randn(1, 16, device="meta"), {}),
        ("main memory", torch.randn(1, 16), {"pivots": torch.arange(4, dtype=torch.int32, device="meta")}),
        ("not contiguous", torch.randn(1, 16), {"pivots": torch.arange(8, dtype=torch.int32)[::2]}),
    ],
)
def test_it_says_why_it_cannot_serve(reason: str, x: Tensor, change: dict[str, Tensor]) -> None:
    factors = make_factors(24, 16, 4, False, torch.float32)._replace(**change)
    with pytest.raises(KernelError, match=reason):
        choose(Op.LINEAR, "cpu", x, factors)


@needs_core
@torch.inference_mode()
def test_auto_takes_it_for_few_rows_and_torch_for_many() -> None:
    factors = make_factors(24, 16, 4, False, torch.float32)
    assert choose(Op.LINEAR, "auto", torch.randn(8, 16), factors).name == "cpu"
    assert choose(Op.LINEAR, "auto", torch.randn(9, 16), factors).name != "cpu"
