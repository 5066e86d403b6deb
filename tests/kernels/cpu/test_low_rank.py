"""The C++ low-rank ops against the reference: shapes, tails, batches, threads, instruction sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draws import examples
from error_rule import POOL, draws_to_pool
from neuronmm.kernels import KernelError, LowRank, low_rank_linear, low_rank_swiglu
from neuronmm.kernels.cpu import core
from neuronmm.kernels.cpu.library import MAX_BATCH
from neuronmm.kernels.ops import Op, choose

built = pytest.mark.skipif(core() is None, reason="the C++ core is not built")
SIZES = st.integers(1, 130)


def make_factors(out: int, inner: int, rank: int, bias: bool, dtype: torch.dtype) -> LowRank:
    a, b = torch.randn(rank, inner) * inner**-0.5, torch.randn(out, rank) * rank**-0.5
    return LowRank(a.to(dtype), b.to(dtype), torch.randn(out).to(dtype) if bias else None)


def rms(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


def wide(*factors: LowRank, absolute: bool = False) -> list[LowRank]:
    """Return the factors in float64, or their absolute values."""
    return [LowRank(*(t if t is None else t.double().abs() if absolute else t.double() for t in f)) for f in factors]


Case = tuple[Tensor, Tensor, Tensor, Tensor]
"""The core's result, plain torch's, the exact one, and the sum of the terms' absolute values."""


def assert_rule(cases: list[Case], terms: int) -> None:
    """Check the project's rule: at most twice the error of plain torch in the same dtype, over all cases together.

    Plain torch may be right by luck on a few numbers, so small results need many draws. Each error is relative to the
    sum of absolute values; otherwise one draw of large numbers would outweigh the others. In float32 plain torch can be
    exact where terms cancel, so the textbook bound of the summation also suffices: one rounding per term, for ``terms``
    terms.
    """
    assert all(y.dtype == plain.dtype and y.shape == plain.shape for y, plain, _, _ in cases)
    ours = torch.cat([((y - exact) / magnitude).flatten() for y, _, exact, magnitude in cases])
    torchs = torch.cat([((plain - exact) / magnitude).flatten() for _, plain, exact, magnitude in cases])
    assert rms(ours) <= max(2 * rms(torchs), terms * 2.0**-24)


def check_linear(rows: int, inner: int, rank: int, out: int, bias: bool, dtype: torch.dtype) -> None:
    cases = [
        linear_case(rows, inner, rank, out, bias, dtype)
        for _ in range(draws_to_pool(rows * min(inner, rank, out), POOL))
    ]
    assert_rule(cases, inner + rank + 2)


def linear_case(rows: int, inner: int, rank: int, out: int, bias: bool, dtype: torch.dtype) -> Case:
    factors, x = make_factors(out, inner, rank, bias, dtype), torch.randn(rows, inner).to(dtype)
    exact = low_rank_linear(x.double(), *wide(factors)[0], impl="naive")
    magnitude = low_rank_linear(x.double().abs(), *wide(factors, absolute=True)[0], impl="naive")
    y, plain = (low_rank_linear(x, *factors, impl=impl) for impl in ("cpu", "naive"))
    return y, plain, exact, magnitude


def check_swiglu(
    rows: int, hidden: int, ranks: tuple[int, int, int], inter: int, bias: bool, dtype: torch.dtype
) -> None:
    independent = rows * min(hidden, inter, *ranks)  # values that pass through the narrowest size share its rounding
    cases = [swiglu_case(rows, hidden, ranks, inter, bias, dtype) for _ in range(draws_to_pool(independent, POOL))]
    assert_rule(cases, 2 * (hidden + max(ranks[:2])) + inter + ranks[2] + 12)


def swiglu_case(
    rows: int, hidden: int, ranks: tuple[int, int, int], inter: int, bias: bool, dtype: torch.dtype
) -> Case:
    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    factors = [make_factors(*shape, rank, bias, dtype) for shape, rank in zip(shapes, ranks, strict=True)]
    x = torch.randn(rows, hidden).to(dtype)
    exact = low_rank_swiglu(x.double(), *wide(*factors), impl="naive")
    gate, up, down = wide(*factors, absolute=True)
    # |silu(a) - silu(b)| <= 1.1 |a - b| and |silu(a)| <= |a|.
    magnitudes = [low_rank_linear(x.double().abs(), *part, impl="naive") for part in (gate, up)]
    magnitude = low_rank_linear(1.1 * magnitudes[0] * magnitudes[1], *down, impl="naive")
    y, plain = (low_rank_swiglu(x, *factors, impl=impl) for impl in ("cpu", "naive"))
    return y, plain, exact, magnitude


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
class TestRule:
    """The rule on drawn shapes, at both thread counts and dtypes."""

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
            check_swiglu(rows, hidden, ranks, inter, bias, dtype)


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", range(1, MAX_BATCH + 1))
@torch.inference_mode()
def test_every_instruction_set_and_batch(isa: str, rows: int, dtype: torch.dtype) -> None:
    check_linear(rows, 576, 77, 193, True, dtype)
    check_swiglu(rows, 64, (16, 33, 7), 300, True, dtype)


@built
@torch.inference_mode()
def test_a_row_does_not_depend_on_its_neighbours_beyond_summation_order() -> None:
    factors, x = make_factors(200, 576, 64, False, torch.float32), torch.randn(8, 576)
    together = low_rank_linear(x, *factors, impl="cpu")
    alone = torch.cat([low_rank_linear(row[None], *factors, impl="cpu") for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@built
@torch.inference_mode()
def test_the_number_of_threads_does_not_change_the_result() -> None:
    before = torch.get_num_threads()
    factors, x = make_factors(2048, 512, 256, True, torch.bfloat16), torch.randn(2, 512).bfloat16()
    results = []
    try:
        for threads in (1, 2, 3, 2, 3):
            torch.set_num_threads(threads)
            results.append(low_rank_linear(x, *factors, impl="cpu"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, results[0]) for y in results)


@built
@torch.inference_mode()
def test_extreme_values_pass_through_silu() -> None:
    one = LowRank(torch.ones(1, 1), torch.ones(1, 1))
    x = torch.tensor([[-1e4], [-90.0], [0.0], [90.0], [1e4], [float("nan")]])
    expected = low_rank_swiglu(x, one, one, one, impl="reference")
    torch.testing.assert_close(low_rank_swiglu(x, one, one, one, impl="cpu"), expected, equal_nan=True)


@built
@torch.inference_mode()
def test_leading_dimensions_and_strided_input() -> None:
    factors, x = make_factors(24, 16, 4, True, torch.bfloat16), torch.randn(2, 32, 3).to(torch.bfloat16)
    strided = x.transpose(1, 2)[..., ::2]
    expected = low_rank_linear(strided.contiguous().view(6, 16), *factors, impl="cpu").view(2, 3, 24)
    assert torch.equal(low_rank_linear(strided, *factors, impl="cpu"), expected)


@built
@pytest.mark.parametrize(
    ("reason", "x", "change"),
    [
        ("rows", torch.randn(MAX_BATCH + 1, 16), {}),
        ("rows", torch.randn(0, 16), {}),
        ("float32 or bfloat16", torch.randn(1, 16).half(), {}),
        ("the same for all", torch.randn(1, 16).bfloat16(), {}),
        ("not contiguous", torch.randn(1, 16), {"A": torch.randn(16, 4).T}),
        ("no backward", torch.randn(1, 16, requires_grad=True), {}),
        ("main memory", torch.randn(1, 16, device="meta"), {}),
    ],
)
def test_a_refusal_gives_the_reason(reason: str, x: Tensor, change: dict[str, Tensor]) -> None:
    factors = make_factors(24, 16, 4, False, torch.float32)._replace(**change)
    with pytest.raises(KernelError, match=reason):
        choose(Op.LINEAR, "cpu", x, factors)


@built
@torch.inference_mode()
def test_auto_chooses_the_core_for_few_rows_and_torch_for_many() -> None:
    factors = make_factors(24, 16, 4, False, torch.float32)
    assert choose(Op.LINEAR, "auto", torch.randn(8, 16), factors).name == "cpu"
    assert choose(Op.LINEAR, "auto", torch.randn(9, 16), factors).name != "cpu"
