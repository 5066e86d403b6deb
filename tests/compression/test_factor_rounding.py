"""Two factors in int4: what fitting them gains, and the checkpoints that have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from compression_runs import Interrupted, config, stop_at, tensors, weights
from draws import examples
from neuronmm.cli import main
from neuronmm.compression.convert import convert
from neuronmm.compression.error_feedback import ErrorFeedback
from neuronmm.compression.factor_rounding import _basis, _cosines, round_two
from neuronmm.compression.factorize import factorize
from neuronmm.compression.moments import Moments
from neuronmm.compression.pipeline import compress
from neuronmm.compression.recover import recover
from neuronmm.engine.engine import load
from neuronmm.kernels import quantise_int4
from neuronmm.models import UserError
from neuronmm.models.low_bits import Int4Linear
from neuronmm.models.neuronx.checkpoint import Checkpoint
from neuronmm.models.spec import CompressionSpec
from tiny_models import load_plain, make_spec, make_tokens, pivoted_spec


def whitened(out: int, features: int, rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs of very different sizes, and the whitened factors of a random weight for them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(1, -2, features)[torch.randperm(features, generator=generator)]
    x = torch.randn(3 * features, features, generator=generator) * sizes
    x = x @ torch.linalg.qr(torch.randn(features, features, generator=generator))[0]
    weight = torch.randn(out, features, generator=generator)
    moments = Moments(features, True, 1e-6)
    moments.add(x, x @ weight.T)
    factors = factorize(weight, rank, moments)
    return x, factors.A.float(), factors.B.float()


def test_fitted_factors_lose_a_fraction_of_what_plain_rounding_loses() -> None:
    x, A, B = whitened(80, 96, 64)
    low, (part,) = round_two(ErrorFeedback(x.T @ x), A, [B])

    def loss(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(((x @ a.T) @ b.T - (x @ A.T) @ B.T).square().sum())

    plain = loss(*(quantise_int4(factor).dequantise(torch.float32) for factor in (A, B)))
    assert loss(low.dequantise(torch.float32), part.dequantise(torch.float32)) < 0.2 * plain


@examples(20)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 20), st.integers(1, 3), st.integers(0, 9))
def test_any_shape_keeps_the_product_nearly(out: int, features: int, rank: int, parts: int, seed: int) -> None:
    rank = min(rank, features, out * parts)
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(rank, features, generator=generator)
    B = [torch.randn(out, rank, generator=generator) for _ in range(parts)]
    low, rounded = round_two(ErrorFeedback(torch.eye(features)), A, B)
    assert low.shape == A.shape and [part.shape for part in rounded] == [part.shape for part in B]
    product, exact = (torch.cat(list(b)) @ a for a, b in (
        (low.dequantise(torch.float32), (part.dequantise(torch.float32) for part in rounded)), (A, B)
    ))  # fmt: skip
    assert (product - exact).norm() <= 0.25 * exact.norm()


def test_the_basis_keeps_the_product_and_evens_the_sizes() -> None:
    _, A, B = whitened(80, 96, 64)
    other, same = _basis(A.double(), B.double())
    torch.testing.assert_close(same @ other, B.double() @ A.double())
    for sizes in (other.norm(dim=1), same.norm(dim=0)):
        assert sizes.max() < 1.1 * sizes.min()
    assert A.norm(dim=1).max() > 1.4 * A.norm(dim=1).min()
    torch.testing.assert_close(_cosines(7) @ _cosines(7).T, torch.eye(7, dtype=torch.float64))


def test_factors_of_zeros_stay_zeros() -> None:
    low, (part,) = round_two(ErrorFeedback(torch.zeros(9, 9)), torch.zeros(3, 9), [torch.zeros(5, 3)])
    assert not (part.dequantise(torch.float32) @ low.dequantise(torch.float32)).any()


SETTINGS = {"method": "whitened", "share_a": "auto", "targets": "all", "factor_dtype": "int4"}


@pytest.mark.parametrize("weight_dtype", ["model", "int8", "int4"])
def test_a_checkpoint_of_int4_factors(
    weight_dtype: str, dense: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    source = dense()
    settings = config(**SETTINGS, calibration=str(text), weight_dtype=weight_dtype)
    report = compress(source, tmp_path / "out", settings)
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (block["format"], block["factors"], report["format"]) == (3, "int4", 3)
    spec = CompressionSpec.parse(block, "config.json")
    stored = tensors(tmp_path / "out")
    assert all(stored[f"{name}.B.weight"].dtype == torch.uint8 for name in spec.ranks) and spec.shared
    model = load_plain(tmp_path / "out")
    assert isinstance(model.get_submodule(next(iter(spec.ranks))).B, Int4Linear)
    with torch.no_grad():
        assert torch.isfinite(model(make_tokens()).logits).all()
    core, plain = (load(tmp_path / "out", impl=impl) for impl in ("cpu", "naive"))
    steps = []
    for one in (core, plain):
        decoder = one.runner.decoder(1, 16)
        decoder.prefill(make_tokens(1, 8), torch.ones(1, 8, dtype=torch.long))
        steps.append(decoder.decode(torch.tensor([9])))
    assert (steps[0] - steps[1]).norm() <= 4e-4 * steps[1].norm()  # int4 rounds the activations to 16 bits


def test_an_interrupted_run_recovery_and_plain_svd(dense: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    source, settings = dense(), config(**SETTINGS, calibration=str(text))
    compress(source, tmp_path / "whole", settings)
    with pytest.raises(Interrupted):
        compress(source, tmp_path / "out", settings, progress=stop_at("rounding", 1))
    compress(source, tmp_path / "out", settings, resume=True)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    for run in (
        lambda: recover(tmp_path / "out", tmp_path / "best"),
        lambda: convert(tmp_path / "out", tmp_path / "no"),
    ):
        with pytest.raises(UserError, match="int4 factors cannot be"):
            run()
    compress(source, tmp_path / "low", config(method="whitened", calibration=str(text), calibration_rows=16))
    recover(tmp_path / "low", tmp_path / "best", factor_dtype="int4")
    assert any(tensor.dtype == torch.uint8 for tensor in tensors(tmp_path / "best").values())
    compress(source, tmp_path / "svd", config(method="svd", factor_dtype="int4"))
    assert load(tmp_path / "svd").generate(["w9"])[0].text


def test_what_int4_factors_are_not_for(
    dense: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((UserError, ValidationError), match="pivoted factors lose too much in 4 bits; use the form two"):
        config(form="pivoted", factor_dtype="int4")
    for spec in (lambda: make_spec({"a": 1}, factors="int4"), lambda: pivoted_spec(factors="int4")):
        with pytest.raises(UserError, match="int4 needs format 3, and no pivoted forms"):
            spec()
    compress(dense(), tmp_path / "out", config(method="svd", factor_dtype="int4"))
    with pytest.raises(UserError, match="its factors are stored in int4, which the Neuron hosts cannot run"):
        Checkpoint(tmp_path / "out", torch.float32)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    compress(tmp_path / "dense-llama", tmp_path / "float", config(method="svd"))
    assert main(["inspect", str(tmp_path / "float"), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert found["parameters"] == expected["parameters"] and found["linears"] == expected["linears"]
