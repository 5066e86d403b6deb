"""Factors of few bits of pivoted linears: coefficients that are fitted to the rounded pivots."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compression_runs import config, tensors
from draws import examples
from neuronmm.compression import checkpoint
from neuronmm.compression.error_feedback import ErrorFeedback
from neuronmm.compression.pipeline import compress
from neuronmm.compression.pivots import Skeleton
from neuronmm.compression.recover import recover
from neuronmm.compression.rounding import ROUND, round_coefficients
from neuronmm.kernels import Form, Fp8, Int8, quantise, quantise_fp8
from neuronmm.models.spec import CompressionSpec

FORMS = st.sampled_from([Form.ROWS, Form.COLUMNS])
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def error(coefficients: Tensor, pivots: Tensor, low: Int8 | Fp8, form: Form) -> float:
    """Return ``||C P - C8 P8||^2``, or the same of the column form, computed from the matrices themselves."""
    rounding = quantise if isinstance(low, Int8) else quantise_fp8
    rounded = rounding(pivots).dequantise(torch.float64), low.dequantise(torch.float64)
    exact = pivots.double(), coefficients.double()
    if form is Form.COLUMNS:
        return float((exact[0] @ exact[1] - rounded[0] @ rounded[1]).square().sum())
    return float((exact[1] @ exact[0] - rounded[1] @ rounded[0]).square().sum())


def drawn(form: Form, rank: int, others: int, wide: int, power: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return random coefficients and pivots in the shapes of ``form``, bf16."""
    pivots, coefficients = torch.randn(rank, wide) * 2.0**power, torch.randn(others, rank) / 3
    if kind == "zero":
        pivots.zero_()
    elif kind == "repeated":
        pivots[:] = pivots[0].clone()
    elif kind == "ill-conditioned":
        pivots = pivots[0] + 0.01 * pivots
    both = coefficients.bfloat16(), pivots.bfloat16()
    return both if form is Form.ROWS else (both[0].T.contiguous(), both[1].T.contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
@examples(80)
@given(
    FORMS,
    st.integers(1, 24),
    st.integers(0, 40),
    st.integers(0, 24),
    st.integers(-60, 60),
    st.sampled_from(["random", "zero", "repeated", "ill-conditioned"]),
)
def test_fitted_coefficients_never_err_more_than_unfitted_ones(
    dtype: str, form: Form, rank: int, others: int, more: int, power: int, kind: str
) -> None:
    coefficients, pivots = drawn(form, rank, others, rank + more, power, kind)
    fitted, plain = round_coefficients(coefficients, pivots, form, ROUND[dtype]), ROUND[dtype](coefficients)
    assert fitted.values.shape == coefficients.shape and fitted.values.dtype == DTYPES[dtype]
    assert fitted.scales.shape == plain.scales.shape and fitted.scales.dtype == torch.float32
    assert fitted.values.is_contiguous() and torch.isfinite(fitted.scales).all()
    scale = float(pivots.double().square().sum() * coefficients.double().square().sum())
    assert error(coefficients, pivots, fitted, form) <= error(coefficients, pivots, plain, form) + 1e-13 * scale


def without_feedback(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ErrorFeedback, "compensated", lambda self, weight, begin: weight.float())


def falling(form: Form) -> tuple[Tensor, Tensor]:
    """Return coefficients and pivots of a real kind: from a matrix whose singular values fall by a factor of 100."""
    generator = torch.Generator().manual_seed(0)
    values = torch.logspace(0, -2, 48, dtype=torch.float64)
    A, B = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((48, 96), (160, 48)))
    skeleton = Skeleton(A * values.sqrt()[:, None], B * values.sqrt())
    parts = skeleton.coefficients.float(), skeleton.rows.float()
    return parts if form is Form.ROWS else (parts[0].T.contiguous(), parts[1].T.contiguous())


@pytest.mark.parametrize(("dtype", "share"), [("int8", 0.7), ("fp8", 0.8)])
@pytest.mark.parametrize("form", [Form.ROWS, Form.COLUMNS], ids=str)
def test_later_columns_make_up_for_what_earlier_ones_lose(
    form: Form, dtype: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    coefficients, pivots = falling(form)
    with_feedback = round_coefficients(coefficients, pivots, form, ROUND[dtype])
    without_feedback(monkeypatch)
    fitted = round_coefficients(coefficients, pivots, form, ROUND[dtype])
    assert torch.equal(with_feedback.scales, fitted.scales)
    assert error(coefficients, pivots, with_feedback, form) < share * error(coefficients, pivots, fitted, form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [Form.ROWS, Form.COLUMNS], ids=str)
def test_the_fit_removes_most_of_what_the_rounded_pivots_add(form: Form, dtype: str) -> None:
    coefficients, pivots = falling(form)
    rounding = ROUND[dtype]
    exact_pivots = rounding(pivots).dequantise(torch.float32)
    plain = error(coefficients, pivots, rounding(coefficients), form)
    fitted = error(coefficients, pivots, round_coefficients(coefficients, pivots, form, rounding), form)
    least = error(coefficients, exact_pivots, rounding(coefficients), form)
    assert fitted < 0.7 * plain
    assert fitted - least < 0.5 * (plain - least), "half of what is lost against exact pivots"


@pytest.mark.parametrize("form", [Form.ROWS, Form.COLUMNS], ids=str)
def test_without_an_error_of_the_pivots_nothing_is_fitted(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    without_feedback(monkeypatch)
    coefficients, pivots = drawn(form, 8, 20, 16, 0, "random")
    pivots = quantise(pivots).dequantise(torch.float32)
    pivots = quantise(pivots).dequantise(torch.float32)  # the values of int8, which int8 stores exactly
    fitted, plain = round_coefficients(coefficients, pivots, form, quantise), quantise(coefficients)
    torch.testing.assert_close(fitted.dequantise(torch.float64), plain.dequantise(torch.float64), rtol=0, atol=1e-6)


def check_rounded(exact: Path, rounded: Path, dtype: str) -> CompressionSpec:
    """Check every factor of ``rounded`` against the factors of ``exact``, and return the spec."""
    before, after = tensors(exact), tensors(rounded)
    spec = CompressionSpec.model_validate(json.loads((rounded / "config.json").read_text())["quantization_config"])
    rounding = ROUND[dtype]
    assert spec.factors == dtype
    for linear in spec.ranks:
        leader = spec.shared.get(linear, linear)
        A, B, form = before[f"{leader}.A.weight"], before[f"{linear}.B.weight"], spec.form_of(leader)
        expected = {
            "A": round_coefficients(A, B, form, rounding) if form is Form.COLUMNS else rounding(A),
            "B": round_coefficients(B, A, form, rounding) if form is Form.ROWS else rounding(B),
        }
        for factor, low in expected.items():
            name = f"{leader if factor == 'A' else linear}.{factor}.weight"
            assert after[name].dtype == DTYPES[dtype]
            assert torch.equal(after[name].view(torch.uint8), low.values.view(torch.uint8))
            assert torch.equal(after[f"{name}_scale"], low.scales)
    return spec


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["two", "pivoted"])
def test_a_run_with_rounded_factors_fits_the_coefficients_of_pivoted_linears_only(
    form: str, dtype: str, dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_SHARD_BYTES", 4000)  # factors of one linear are in different shards
    source = dense(dtype=torch.bfloat16)
    settings = {"share_a": "auto", "targets": "all", "form": form}
    compress(source, tmp_path / "exact", config(**settings))
    report = compress(source, tmp_path / dtype, config(factor_dtype=dtype, **settings))
    assert report["factor_dtype"] == dtype and report["bytes"]["compressed"] < report["bytes"]["dense"]
    spec = check_rounded(tmp_path / "exact", tmp_path / dtype, dtype)
    assert spec.shared and {entry.form for entry in spec.forms.values()} == (
        {"rows", "columns"} if form == "pivoted" else set()
    )


def test_recovered_factors_are_fitted_too(dense: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    more = {"calibration": str(text), "calibration_rows": 24, "form": "pivoted"}
    compress(dense(dtype=torch.bfloat16), tmp_path / "low", config(method="whitened", **more))
    recover(tmp_path / "low", tmp_path / "exact")
    recover(tmp_path / "low", tmp_path / "int8", factor_dtype="int8")
    check_rounded(tmp_path / "exact", tmp_path / "int8", "int8")
