"""The gradients' second moments against the complete model, and the factors that they give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import PreTrainedModel

from brute_force import least
from compression_runs import config, edit_tensors, weights
from draws import examples
from neuronmm.compression import fisher, layer, pipeline
from neuronmm.compression.calibration_store import SharedStore
from neuronmm.compression.continuation import Sampled
from neuronmm.compression.factorize import factorize
from neuronmm.compression.moments import Moments, side
from neuronmm.compression.pipeline import compress
from neuronmm.models import UserError, processes
from neuronmm.models.families import LAYERS, TARGETS
from neuronmm.models.load import load_pretrained

SIZES = st.tuples(st.integers(2, 20), st.integers(2, 20), st.integers(1, 40))


def store_in(folder: Path) -> SharedStore:
    """Return the store of a finished run in ``folder``, for reading."""
    store = SharedStore.__new__(SharedStore)
    store._folder, store._targets, store._known = folder, "all", set()
    return store


def noted_rows(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list that receives the rows of a run's calibration."""
    rows, inner = list[Tensor](), pipeline.measure_gradients
    monkeypatch.setattr(pipeline, "measure_gradients", lambda *args: rows.append(args[3]) or inner(*args))
    return rows


def directly(model: PreTrainedModel, rows: Tensor) -> dict[str, Tensor]:
    """Return the corrected mean outer products of the gradients, from one pass backwards through the complete model."""
    captured: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    names = [f"{LAYERS}.{index}.{name}" for index in range(2) for name in TARGETS["all"]]
    for name in names:

        def keep(module: Any, inputs: Any, output: Tensor, name: str = name) -> None:
            output.retain_grad()
            captured[name] = (module.weight.detach().double(), inputs[0].detach().double(), output)

        model.get_submodule(name).register_forward_hook(keep)
    logits = model(rows).logits
    choose = Sampled(0)
    chosen = torch.cat([choose(row) for row in logits.detach()])
    cross_entropy(logits.flatten(0, 1), chosen, reduction="sum").backward()
    sums = {}
    for name, (weight, x, output) in captured.items():
        assert output.grad is not None
        g = output.grad.double()
        chosen = fisher._chosen(len(rows), 0)
        few, inputs = g[chosen], x[chosen]
        apart = (few.square().sum(-1) * inputs.square().sum(-1)).sum()
        together = torch.einsum("rto,rti->roi", few, inputs).square().sum()
        _, of_inputs = side(name.split(".", 3)[3], *weight.shape)
        g = (g @ weight if of_inputs else g).flatten(0, 1)
        sums[name] = g.T @ g * together / apart / rows.numel()
    return sums


@pytest.mark.parametrize("block", [384, 10])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_moments_are_those_of_one_pass_backwards_through_the_complete_model(
    family: str, block: int, dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fisher, "_BLOCK", block)  # the larger one covers every matrix of this model
    monkeypatch.setattr(fisher, "multiplies_bf16", lambda device: False)
    monkeypatch.setattr(Tensor, "bfloat16", lambda self: self)  # the layers' inputs on the disk
    rows = noted_rows(monkeypatch)
    settings = config(method="fisher", targets="all", calibration_rows=16)
    source = dense(family)
    compress(source, tmp_path / "out", settings, store=tmp_path / "store")
    expected = directly(load_pretrained(source, torch.float32), rows[0])
    store = store_in(tmp_path / "store")
    found = {
        f"{LAYERS}.{index}.{name}": sums
        for index in range(2)
        for name, sums in store.gradients(index, torch.device("cpu")).items()
    }
    assert found.keys() == expected.keys()
    for name, sums in expected.items():
        torch.testing.assert_close(found[name], sums, rtol=1e-3, atol=1e-5 * float(sums.abs().max()), msg=name)


def test_several_processes_measure_the_factor_on_the_rows_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fisher._chosen(21, 5)
    assert sum(whole) == 6 and whole != fisher._chosen(21, 6)
    for size in (2, 3):
        monkeypatch.setattr(processes, "size", lambda size=size: size)
        for rank in range(size):
            monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
            assert fisher._chosen(21, 5) == whole[rank::size]


def draw(sizes: tuple[int, int, int], of_inputs: bool, seed: int) -> tuple[Tensor, Moments, Tensor, Tensor]:
    """Return a weight, its moments with gradients, and the damped matrices F [out, out] and G [in, in] of the loss."""
    out, into, tokens = sizes
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, into, generator=generator, dtype=torch.float64)
    x, g = (torch.randn(tokens, size, generator=generator, dtype=torch.float64) for size in (into, out))
    x[:, -1] *= 30
    g[:, 0] *= 5
    moments = Moments(into if of_inputs else out, of_inputs, 1e-3)
    moments.add(x, x @ weight.T)
    F = g.T @ g + 1e-3 * torch.eye(out, dtype=torch.float64)
    known = moments.with_gradients(weight.T @ F @ weight if of_inputs else F)
    return weight, known, F, x.T @ x + moments.damping * torch.eye(into, dtype=torch.float64)


def cost(delta: Tensor, F: Tensor, G: Tensor) -> float:
    """Compute ``tr(F D G D^T)`` directly."""
    return float(((F @ delta @ G) * delta).sum())


@examples(60)
@given(sizes=SIZES, fraction=st.floats(0, 1), of_inputs=st.booleans(), seed=st.integers(0, 99))
def test_the_loss_is_the_dropped_spectrum_of_the_doubly_whitened_weight_and_the_direct_cost(
    sizes: tuple[int, int, int], fraction: float, of_inputs: bool, seed: int
) -> None:
    weight, known, F, G = draw(sizes, of_inputs, seed)
    rank = 1 + int(fraction * (min(weight.shape) - 1))
    factors = factorize(weight, rank, known)
    both = torch.linalg.cholesky(F).T @ weight @ torch.linalg.cholesky(G)
    spectrum = torch.linalg.svdvals(both).square()
    rounding = 1e-9 * factors.energy
    assert factors.energy == pytest.approx(float(spectrum.sum()), rel=1e-6)
    assert factors.loss == pytest.approx(float(spectrum[rank:].sum()), rel=1e-5, abs=rounding)
    assert cost(weight - factors.B @ factors.A, F, G) == pytest.approx(factors.loss, rel=1e-4, abs=rounding)


@pytest.mark.parametrize(("out", "into"), [(12, 20), (20, 12)])
def test_gradient_descent_finds_no_cheaper_matrix_of_the_rank(out: int, into: int) -> None:
    weight, known, F, G = draw((out, into, 60), out > into, 3)
    F, G = F / F.diagonal().mean(), G / G.diagonal().mean()
    factors = factorize(weight, 4, known)
    best = cost(weight - factors.B @ factors.A, F, G)
    whitened = factorize(weight, 4, Moments.with_gradients(known, torch.zeros_like(known.gradients)))
    assert best < cost(weight - whitened.B @ whitened.A, F, G), "the gradients must matter"
    found = least(lambda product: ((F @ (weight - product) @ G) * (weight - product)).sum(), out, into, 4)
    assert best <= found * (1 + 1e-6) and found < 1.05 * best


def test_without_gradients_the_factors_stay_finite() -> None:
    """A linear whose outputs nothing depends on costs nothing at any rank."""
    for of_inputs in (True, False):
        weight, known, _, _ = draw((6, 8, 30), of_inputs, 0)
        factors = factorize(weight, 2, known.with_gradients(torch.zeros_like(known.gradients)))
        assert torch.isfinite(factors.A).all() and torch.isfinite(factors.B).all()


def test_gradients_that_are_not_numbers_are_refused() -> None:
    _, known, _, _ = draw((6, 8, 30), True, 0)
    with pytest.raises(ValueError, match="gradients contain NaN"):
        known.with_gradients(torch.full((8, 8), float("nan")))


def test_the_dropped_spectrum_predicts_the_divergence(
    dense: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the loss is the divergence of the complete model, as long as that is small."""
    rows = noted_rows(monkeypatch)
    source = dense()
    settings = config(
        method="fisher",
        calibration=str(text),
        calibration_rows=120,
        ratio=0.05,
        align=1,
        allocation="global",
        form="pivoted",
    )
    losses: list[float] = []
    factorized = layer.factorize

    def noting(*args: Any, **kwargs: Any) -> Any:
        factors = factorized(*args, **kwargs)
        losses.append(factors.loss)
        return factors

    monkeypatch.setattr(layer, "factorize", noting)
    compress(source, tmp_path / "low", settings)
    models = [load_pretrained(folder, torch.float32) for folder in (source, tmp_path / "low")]
    with torch.no_grad():
        a, b = (model(rows[0]).logits.log_softmax(-1).flatten(0, 1) for model in models)
    measured = float(kl_div(b, a, log_target=True, reduction="batchmean"))
    predicted = sum(losses) / 2 / rows[0].numel()
    assert 0 < measured < 0.05 and predicted / 2 < measured < predicted * 2


class Interrupted(BaseException):
    """A kill, which no code catches."""


@pytest.mark.parametrize("linear", ["self_attn.v_proj", "mlp.up_proj"])
def test_changes_at_several_positions_add_up(
    linear: str, dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value is read at all later positions. With a mean in the inputs, its changes do not cancel."""
    rows, source = noted_rows(monkeypatch), dense()
    edit_tensors(source, lambda tensors: tensors["model.embed_tokens.weight"].add_(0.4))
    settings = config(method="fisher", targets="all", calibration_rows=160, calibration_length=48)
    compress(source, tmp_path / "out", settings, store=tmp_path / "store")
    store = store_in(tmp_path / "store")
    sums = store.moments(1, list(TARGETS["all"]), 1e-9, torch.device("cpu"))[linear]
    gradients = store.gradients(1, torch.device("cpu"))[linear]
    models = [load_pretrained(source, torch.float32) for _ in range(2)]
    weight = models[1].get_parameter(f"{LAYERS}.1.{linear}.weight")
    E = 0.003 * torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        weight += weight @ E
        a, b = (model(rows[0]).logits.double().log_softmax(-1).flatten(0, 1) for model in models)
    measured = float(kl_div(b, a, log_target=True, reduction="batchmean"))
    predicted = float(((gradients @ E.double() @ sums.gram) * E.double()).sum()) / 2 / rows[0].numel()
    assert measured / 1.6 < predicted < 1.6 * measured


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_an_interrupted_measurement_resumes_to_the_same_bytes(
    count: int, dense: Callable[..., Path], tmp_path: Path
) -> None:
    source = dense("qwen2")
    settings = config(method="fisher", targets="all", form="pivoted", allocation="global")
    left = [count]

    def stop(stage: str, fraction: float) -> None:
        left[0] -= stage == "measuring gradients"
        if left[0] == 0:
            raise Interrupted

    compress(source, tmp_path / "whole", settings)
    with pytest.raises(Interrupted):
        compress(source, tmp_path / "out", settings, progress=stop)
    compress(source, tmp_path / "out", settings, resume=True)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


def test_the_pass_backwards_continues_where_it_was_interrupted(
    dense: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, settings, calls = dense(), config(method="fisher", calibration=str(text)), list[str]()
    for name in ("_run_forwards", "_run_backwards"):
        inner = getattr(fisher, name)
        monkeypatch.setattr(fisher, name, lambda *args, name=name, inner=inner: calls.append(name) or inner(*args))

    def stop(stage: str, fraction: float) -> None:
        if calls.count("_run_backwards") == 1:
            raise Interrupted

    with pytest.raises(Interrupted):
        compress(source, tmp_path / "out", settings, progress=stop)
    compress(source, tmp_path / "out", settings, resume=True)
    assert calls == ["_run_forwards", "_run_backwards", "_run_backwards"]
    assert not list((tmp_path).glob("out.partial*"))


def test_layers_that_are_compressed_need_no_gradients(
    dense: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, settings = dense(), config(method="fisher", calibration=str(text), share_a="auto", recover="factors")

    def stop(stage: str, fraction: float) -> None:
        if stage == "recovering":
            raise Interrupted

    with pytest.raises(Interrupted):
        compress(source, tmp_path / "out", settings, progress=stop)
    monkeypatch.setattr(fisher, "_run_forwards", lambda *args: pytest.fail("the gradients were measured again"))
    compress(source, tmp_path / "out", settings, resume=True)


def test_a_damaged_checkpoint_is_named(dense: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    source = dense()
    edit_tensors(source, lambda tensors: tensors["model.norm.weight"].fill_(1e38))
    with pytest.raises(UserError, match="NaN or infinity"):
        compress(source, tmp_path / "out", config(method="fisher", calibration=str(text)))
