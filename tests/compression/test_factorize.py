"""The closed form against direct computation and gradient descent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from brute_force import least
from draws import examples
from neuronmm.compression.factorize import SPECTRUM_POINTS, factorize, spectrum
from neuronmm.compression.layer_pair import LayerPair, weight_of
from neuronmm.compression.moments import Moments
from neuronmm.compression.ranks import Linear, energy, relative

SIZES = st.tuples(st.integers(2, 40), st.integers(2, 40), st.integers(1, 60))


def draw(out: int, into: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a weight [out, in] and inputs [in, tokens] with a dead feature and a massive one."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, into, generator=generator)
    inputs = torch.randn(into, tokens, generator=generator)
    inputs[0] = 0
    inputs[-1] *= 300
    return weight, inputs


def gather(weight: Tensor, inputs: Tensor, damping: float, of_inputs: bool | None = None) -> Moments:
    """Return the moments of ``weight`` [out, in] over ``inputs`` [in, tokens]; by default of its smaller side."""
    out, into = weight.shape
    of_inputs = out > into if of_inputs is None else of_inputs
    moments = Moments(into if of_inputs else out, of_inputs, damping)
    moments.add(inputs.T, (weight.double() @ inputs.double()).T)
    return moments


def damped(inputs: Tensor, moments: Moments) -> Tensor:
    """Compute the damped Gram matrix of the inputs [in, in] directly, in float64."""
    return inputs.double() @ inputs.double().T + moments.damping * torch.eye(len(inputs), dtype=torch.float64)


def objective(delta: Tensor, gram: Tensor) -> float:
    """Compute ``tr(D G D^T)`` directly."""
    return float(((delta @ gram) * delta).sum())


@examples(60)
@given(sizes=SIZES, fraction=st.floats(0, 1), of_inputs=st.booleans(), seed=st.integers(0, 99))
def test_the_reported_loss_is_the_dropped_spectrum_and_the_direct_error(
    sizes: tuple[int, int, int], fraction: float, of_inputs: bool, seed: int
) -> None:
    out, into, tokens = sizes
    weight, inputs = draw(out, into, tokens, seed)
    rank = 1 + int(fraction * (min(out, into) - 1))
    moments = gather(weight, inputs, 1e-3, of_inputs)
    factors = factorize(weight, rank, moments)
    assert factors.A.shape == (rank, into) and factors.B.shape == (out, rank)

    gram = damped(inputs, moments)
    root = torch.linalg.cholesky(gram)
    spectrum = torch.linalg.svdvals(weight.double() @ root).square()
    rounding = 1e-9 * factors.energy
    assert factors.energy == pytest.approx(float(spectrum.sum()), rel=1e-9)
    assert factors.loss == pytest.approx(float(spectrum[rank:].sum()), rel=1e-6, abs=rounding)
    direct = objective(weight.double() - factors.B @ factors.A, gram)
    assert direct == pytest.approx(factors.loss, rel=1e-6, abs=rounding)


@examples(30)
@given(sizes=SIZES, of_inputs=st.booleans(), seed=st.integers(0, 99))
def test_asvd_is_the_svd_of_the_weight_scaled_by_the_root_of_the_inputs_sizes(
    sizes: tuple[int, int, int], of_inputs: bool, seed: int
) -> None:
    """ASVD (arXiv 2312.05821): W S is truncated, where S is diagonal, and multiplied by the inverse of S."""
    out, into, tokens = sizes
    weight, inputs = draw(out, into, tokens, seed)
    rank = (min(out, into) + 1) // 2
    moments = gather(weight, inputs, 1e-3, of_inputs)
    norms = (inputs.double().square().sum(1) + moments.damping).sqrt()  # of each input feature
    scale = (norms / norms.square().mean().sqrt()).sqrt()
    u, s, v = torch.linalg.svd(weight.double() * scale, full_matrices=False)
    factors = factorize(weight, rank, moments, scaled=True)
    assert factors.loss == pytest.approx(float(s[rank:].square().sum()), rel=1e-6, abs=1e-9 * factors.energy)
    assert factors.energy == pytest.approx(float(s.square().sum()), rel=1e-9)
    truncated = (u[:, :rank] * s[:rank]) @ v[:rank]
    assert float(((factors.B @ factors.A) * scale - truncated).norm()) <= 1e-5 * float(s.norm())


@examples(30)
@given(sizes=SIZES, seed=st.integers(0, 99))
def test_plain_svd_equals_torch_svd(sizes: tuple[int, int, int], seed: int) -> None:
    out, into, _ = sizes
    weight, _ = draw(out, into, 1, seed)
    rank = (min(out, into) + 1) // 2
    factors = factorize(weight, rank)
    u, s, vt = torch.linalg.svd(weight.double(), full_matrices=False)
    torch.testing.assert_close(factors.B @ factors.A, (u[:, :rank] * s[:rank]) @ vt[:rank], rtol=1e-6, atol=1e-6)
    assert factors.loss == pytest.approx(float(s[rank:].square().sum()), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("out", "into"), [(12, 20), (20, 12)])
def test_gradient_descent_finds_no_better_matrix_of_the_rank(out: int, into: int) -> None:
    """Gradient descent from random factors comes close to the closed form and never below it."""
    weight, inputs = draw(out, into, 30, 3)
    inputs[-1] /= 100
    moments = gather(weight, inputs, 1e-3)
    gram = damped(inputs, moments)
    best = factorize(weight, 4, moments).loss

    def loss(product: Tensor) -> Tensor:
        delta = weight.double() - product
        return ((delta @ gram) * delta).sum()

    descended = least(loss, out, into, 4)
    assert best * (1 - 1e-9) <= descended <= best * 1.05


@pytest.mark.parametrize(("out", "into"), [(16, 24), (24, 16)])
def test_whitening_beats_plain_svd_on_its_own_inputs(out: int, into: int) -> None:
    weight, inputs = draw(out, into, 100, 5)
    moments = gather(weight, inputs, 1e-4)
    plain = factorize(weight, 6)
    whitened = factorize(weight, 6, moments)
    assert whitened.loss < 0.5 * objective(weight.double() - plain.B @ plain.A, damped(inputs, moments))


def test_the_factors_are_balanced() -> None:
    weight, inputs = draw(20, 30, 50, 1)
    factors = factorize(weight, 8, gather(weight, inputs, 1e-3))
    torch.testing.assert_close(factors.A.norm(dim=1), factors.B.norm(dim=0))


@pytest.mark.parametrize(("out", "into"), [(32, 48), (48, 32), (40, 9)])
def test_the_spectrum_has_the_errors_at_other_ranks(out: int, into: int) -> None:
    weight, inputs = draw(out, into, 100, 3)
    for known in (None, gather(weight, inputs, 1e-4)):
        kept = factorize(weight, 4, known).spectrum
        ranks = [min(out, into) * step // SPECTRUM_POINTS for step in range(1, SPECTRUM_POINTS)]
        errors = [factorize(weight, rank, known).relative_error if rank else 1.0 for rank in ranks]
        assert kept == pytest.approx(errors, rel=1e-3) and kept[0] > 2 * kept[-1] > 0


@pytest.mark.parametrize("of_inputs", [True, False])
def test_fewer_tokens_than_features_and_all_zero_inputs_are_factorised(of_inputs: bool) -> None:
    """Whitening commonly fails on singular Gram matrices; these must work, all-zero ones included."""
    weight, inputs = draw(24, 16, 2, 2)
    for x in (inputs, torch.zeros(16, 3)):
        factors = factorize(weight, 16, gather(weight, x, 1e-4, of_inputs))
        assert torch.isfinite(factors.A).all() and torch.isfinite(factors.B).all()
        torch.testing.assert_close(factors.B @ factors.A, weight.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of_inputs", [True, False])
def test_a_gram_matrix_that_rounding_made_indefinite_is_factorised(of_inputs: bool) -> None:
    weight, inputs = draw(24, 16, 4, 2)
    moments = gather(weight, inputs, 1e-9, of_inputs)
    moments.gram -= 1e-3 * torch.eye(len(moments.gram))
    factors = factorize(weight, 5, moments)
    assert torch.isfinite(factors.A).all() and 0 <= factors.relative_error < 1


@pytest.mark.parametrize("of_inputs", [True, False])
def test_bad_numbers_are_refused(of_inputs: bool) -> None:
    weight, inputs = draw(8, 6, 10, 0)
    with pytest.raises(ValueError, match="activations contain NaN"):
        factorize(weight, 2, gather(weight, inputs * float("nan"), 1e-3, of_inputs))
    with pytest.raises(ValueError, match="weight contains NaN"):
        factorize(weight.index_fill(0, torch.tensor([1]), float("inf")), 2)
    for rank in (0, 7):
        with pytest.raises(ValueError, match="impossible"):
            factorize(weight, rank)


def test_a_shared_a_loses_the_sum_of_the_relative_losses_and_keeps_linears_of_low_energy() -> None:
    """The queries are a hundred times larger than the values: without scales they would determine A."""
    layer = nn.Module()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 200, generator=generator, dtype=torch.float64) * torch.linspace(1, 3, 16)[:, None]
    for name, size, scale in (("q", 24, 100.0), ("v", 8, 1.0)):
        linear = nn.Linear(16, size, bias=False)
        linear.weight = nn.Parameter(scale * torch.randn(size, 16, generator=generator), requires_grad=False)
        layer.add_module(name, linear)
    members = [Linear("q", 24, 16), Linear("v", 8, 16)]
    moments = gather(layer.get_parameter("q.weight"), inputs, 1e-9, of_inputs=True)
    energies = [energy(spectrum(layer.get_parameter(f"{member.name}.weight"), moments)) for member in members]
    joint = Linear.sharing(members, energies)
    stacked = weight_of(layer, joint, "")
    losses = relative(spectrum(stacked, moments), max(energies))

    def lost(linear: Linear) -> list[float]:
        pair = LayerPair(layer, "")
        factors = factorize(pair.weight(linear), 8, moments)
        pair.replace(linear, factors.A, factors.B, torch.float32)
        compressed = pair.compressed
        gaps = [(compressed.get_submodule(m.name)(x) - layer.get_submodule(m.name)(x)).square().sum() for m in members]
        return [float(gap) / whole for gap, whole in zip(gaps, energies, strict=True)]

    x = inputs.T.float()
    fair, loud = lost(joint), lost(replace(joint, scales=(1.0, 1.0)))
    assert sum(fair) == pytest.approx(float(losses[8:].sum()), rel=1e-4)
    assert sum(fair) < 0.9 * sum(loud)
    assert fair[1] < 0.5 * loud[1]
