"""Matrices of few bits times activations of 16 bits: the same numbers on every instruction set, and their error."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core_decoding import needs_core
from draws import examples
from error_rule import assert_twice_plain
from neuronmm.kernels import Form, Int4, Int8, KernelError, LowRank, low_rank_linear, quantise, quantise_int4
from neuronmm.kernels.cpu.library import TYPES, Linear, Matrix, require
from neuronmm.kernels.cpu.linears import describe
from neuronmm.kernels.cpu.step import LinearWeights
from neuronmm.kernels.low_bits import LowBits, Weight
from rounded_activations import SMALLEST, round_activations

pytestmark = needs_core

Rounding = Callable[[Tensor], LowBits]
ROUNDINGS: list[Rounding] = [quantise, quantise_int4]


def multiply(
    weight: Weight, x: Tensor, activations: torch.dtype = torch.bfloat16, bias: Tensor | None = None
) -> Tensor:
    """The core's product of a dense matrix [out, in] and float32 activations [rows, in] in a model of that dtype."""
    y = torch.empty(len(x), weight.shape[0])
    linear = Linear(Matrix.of(weight, activations), Matrix(), None if bias is None else bias.data_ptr())
    at_x, at_y = (ctypes.c_void_p(t.data_ptr()) for t in (x, y))
    require().neuronmm_low_rank_linear(ctypes.byref(linear), at_x, TYPES[x.dtype], len(x), at_y, 2)
    return y


def multiply_prompt(weight: LowBits, x: Tensor) -> Tensor:
    """The core's product of a dense matrix [out, in] and bf16 activations [rows, in], more rows than a GEMV takes."""
    assert len(x) > 16
    return torch.ops.neuronmm.linears(x, describe([LinearWeights(weight)], x.dtype), weight.shape[0])


def expected(weight: LowBits, x: Tensor) -> Tensor:
    values, scales = round_activations(x)
    integers = weight.values if isinstance(weight, Int8) else weight.integers()
    sums = values @ integers.double().T  # exact: integers below 2^53
    return sums.float() * scales * weight.scales


def outliers(rows: int, cols: int) -> Tensor:
    """Activations as decoders have them: a few are a hundred times larger than the others."""
    x = torch.randn(rows, cols)
    x[:, :: max(cols // 3, 1)] *= 100
    return x


@pytest.mark.usefixtures("isa")
@examples(40)
@given(st.sampled_from(ROUNDINGS), st.integers(1, 70), st.integers(1, 300), st.integers(1, 8), st.integers(-90, 60))
def test_every_instruction_set_gives_the_same_numbers(
    rounded: Rounding, out: int, cols: int, rows: int, power: int
) -> None:
    weight, x = rounded(torch.randn(out, cols)), outliers(rows, cols) * 2.0**power
    assert torch.equal(multiply(weight, x), expected(weight, x))
    bias = torch.randn(out) * 2.0**power
    values, scales = round_activations(x)
    integers = weight.values if isinstance(weight, Int8) else weight.integers()
    wide = (values @ integers.double().T).float() * scales
    biased = (wide.double() * weight.scales.double() + bias.double()).float()  # the product is exact
    assert torch.equal(multiply(weight, x, bias=bias), biased)


def largest(rounded: Rounding, cols: int) -> LowBits:
    """A matrix [3, cols] whose rows have the largest numbers of a type, of both signs."""
    weight = rounded(torch.zeros(3, cols))
    if isinstance(weight, Int8):
        weight.values.fill_(-128)[1] = 127
    else:  # in all rows but one q is 0 and m is 255; in that one q is 15, s is 255 and m is 0
        groups = weight.values.shape[1] // 288
        words = weight.values[0, : 256 * groups].view(4 * groups, 16, 4)
        steps, offsets = weight.values[0, 256 * groups :].view(groups, 2, 16).unbind(1)
        words[:], steps[:], offsets[:] = 0, 255, 255
        words[:, 1], offsets[:, 1] = 255, 0
        assert weight.integers().unique().tolist() == [-4080, 3825]
    return weight


@pytest.mark.parametrize("rounded", ROUNDINGS)
@pytest.mark.parametrize("cols", [512, 1024, 1025, 2048, 8192, 8193, 20000])
def test_the_largest_numbers_do_not_overflow(cols: int, rounded: Rounding, isa: str) -> None:
    weight, x = largest(rounded, cols), torch.ones(2, cols)
    x[1] = -1
    assert torch.equal(multiply(weight, x), expected(weight, x))
    prompt = x.repeat(10, 1)[1:].bfloat16()
    exact = expected(weight, prompt.float()).bfloat16()
    # bf16 has eight bits: enough for the integers of int8, not for those of int4.
    rounded_integers = isa.startswith("avx512") and isinstance(weight, Int4)
    torch.testing.assert_close(multiply_prompt(weight, prompt), exact, rtol=2.0**-7 if rounded_integers else 0, atol=0)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("isa", ["avx2"], indirect=True)  # the others multiply prompts in bf16 or fp32
@examples(30)
@given(st.sampled_from(ROUNDINGS), *(st.integers(*sizes) for sizes in ((1, 70), (1, 1300), (17, 40))))
def test_prompts_sum_the_same_integers(rounded: Rounding, out: int, cols: int, rows: int) -> None:
    """Those of int8 exactly, those of int4 within a group of columns."""
    weight, x = rounded(torch.randn(out, cols)), outliers(rows, cols).bfloat16()
    y, exact = multiply_prompt(weight, x), expected(weight, x.float())
    if isinstance(weight, Int8):
        assert torch.equal(y, exact.bfloat16())
    else:
        size = x.double().abs() @ weight.dequantise(torch.float64).abs().T
        assert ((y.double() - exact.double()).abs() <= exact.double().abs() / 256 + size * 2.0**-18).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("isa", ["avx2"], indirect=True)
@examples(20)
@given(st.integers(1, 40), st.integers(2, 20), st.integers(18, 40))
def test_a_row_of_a_prompt_in_int4_does_not_depend_on_the_others(out: int, groups: int, rows: int) -> None:
    """The exact products are zero, so what is compared is what fp32 sums over the groups lose."""
    half, x = torch.randn(out, 32 * groups), torch.randn(rows, 32 * groups).bfloat16()
    weight, x = quantise_int4(torch.cat([half, half], dim=1)), torch.cat([x, -x], dim=1)
    y = multiply_prompt(weight, x)
    assert y.any()
    for first in range(1, min(rows - 17, 6) + 1):
        assert torch.equal(y[first:], multiply_prompt(weight, x[first:]))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("rounded", ROUNDINGS)
def test_zero_and_tiny_activations(rounded: Rounding) -> None:
    weight = rounded(torch.randn(5, 40))
    x = torch.zeros(3, 40)
    x[1], x[2] = SMALLEST / 5, 1e-42
    y = multiply(weight, x)
    assert torch.equal(y, expected(weight, x)) and not y[0].any() and y[1].any() and not y[2].any()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("rounded", ROUNDINGS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_shows(bad: float, rounded: Rounding) -> None:
    x = torch.randn(2, 50)
    x[1, 7] = -bad
    y = multiply(rounded(torch.randn(4, 50)), x)
    assert y[0].isfinite().all() and not y[1].isfinite().any()


@examples(20)
@given(st.sampled_from(ROUNDINGS), st.integers(1, 80), st.integers(1, 400), st.integers(1, 8))
def test_an_activation_is_off_by_half_a_step_and_the_error_below_that_of_bf16(
    rounded: Rounding, out: int, cols: int, rows: int
) -> None:
    """Even with outliers, which coarsen the step of the token's other activations."""
    weight, x = rounded(torch.randn(out, cols)), outliers(rows, cols)
    wide = weight.dequantise(torch.float64)
    exact, y = x.double() @ wide.T, multiply(weight, x).double()
    step = x.abs().amax(1, keepdim=True).double() / 32767
    assert ((y - exact).abs() <= step / 2 * wide.abs().sum(1) + 2.0**-22 * exact.abs()).all()
    bf16 = x.bfloat16().double() @ wide.T
    assert (y - exact).norm() <= (bf16 - exact).norm() / 2 + 2.0**-23 * exact.norm()


@examples(20)
@given(st.sampled_from(ROUNDINGS), *(st.integers(1, most) for most in (80, 200, 60, 8)))
def test_factors_of_few_bits_in_bf16_keep_the_rule(
    rounded: Rounding, out: int, cols: int, rank: int, rows: int
) -> None:
    def case() -> tuple[Tensor, LowRank]:
        return torch.randn(rows, cols).bfloat16(), LowRank(
            rounded(torch.randn(rank, cols)), rounded(torch.randn(out, rank))
        )

    assert_twice_plain(
        (case() for _ in range(16)),
        lambda c: low_rank_linear(c[0], *c[1], impl="cpu"),
        lambda c: low_rank_linear(c[0], *c[1], impl="naive"),
        lambda c: low_rank_linear(c[0].double(), *(w.dequantise(torch.float64) for w in c[1][:2]), impl="naive"),
    )


@pytest.mark.usefixtures("isa")
def test_a_float32_model_multiplies_its_activations_as_they_are() -> None:
    weight, x = quantise(torch.randn(30, 500)), outliers(3, 500)
    exact = x.double() @ weight.dequantise(torch.float64).T
    wide, rounded = (multiply(weight, x, dtype).double() - exact for dtype in (torch.float32, torch.bfloat16))
    assert wide.norm() < 2.0**-22 * exact.norm() < rounded.norm()


def test_pivoted_factors_in_int4_are_refused() -> None:
    factors = LowRank(quantise_int4(torch.randn(5, 8)), quantise(torch.randn(4, 5)), None, Form.ROWS, 2)
    with pytest.raises(KernelError, match="pivoted factors in int4"):
        low_rank_linear(torch.randn(1, 8), *factors, impl="cpu")
    assert low_rank_linear(torch.randn(1, 8), *factors).shape == (1, 9)
