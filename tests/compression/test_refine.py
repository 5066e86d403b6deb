"""Refinement of a compressed layer against the dense one."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from neuronmm.compression import refine as refine_module
from neuronmm.compression.factorize import factorize
from neuronmm.compression.layer_pair import LayerPair
from neuronmm.compression.moments import moments_of
from neuronmm.compression.ranks import Linear
from neuronmm.compression.refine import refine
from neuronmm.compression.streaming import Streams, advance
from neuronmm.compression.training import Course, Objective, Trained, train
from neuronmm.models import LowRankLinear
from neuronmm.models.families import TARGETS
from tiny_models import make_tiny

INSIDE = "layer."

READERS = {
    "input_layernorm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
}


@pytest.fixture
def case() -> tuple[nn.Module, nn.Module, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return a dense layer, its compressed form, the inputs of both [rows, length, hidden], and RoPE's cos and sin."""
    torch.manual_seed(0)
    model = make_tiny("qwen2").model
    dense = model.layers[0].requires_grad_(False)
    hidden = torch.randn(16, 24, 32)
    rotary = model.rotary_emb(hidden, torch.arange(24)[None])
    linears = [
        Linear(INSIDE + name, *dense.get_submodule(name).weight.shape) for name in TARGETS["all"] if "down" not in name
    ]
    pair = LayerPair(dense, INSIDE)
    names = [linear.name.removeprefix(INSIDE) for linear in linears]
    moments, _ = moments_of(dense, hidden, rotary, names, 1e-3)
    for linear, name in zip(linears, names, strict=True):
        factors = factorize(pair.weight(linear), 6, moments[name])
        pair.replace(linear, factors.A, factors.B, torch.float32)
    return dense, pair.compressed, hidden, hidden + 0.05 * torch.randn_like(hidden), rotary


def ignore(fraction: float) -> None:
    """Ignore progress."""


def course(epochs: int, rate: float) -> Course:
    return Course(epochs, rate, 0.05, (0.9, 0.95))


def relative(expected: Tensor, got: Tensor) -> float:
    return float(((got - expected).square().sum(-1) / expected.square().sum(-1)).mean())


def test_refinement_reduces_the_error_on_unseen_tokens(case) -> None:
    dense, compressed, hidden, ours, rotary = case
    fresh = torch.randn(8, 24, 32)
    targets, before = (
        advance(dense, hidden, rotary),
        relative(advance(dense, fresh, rotary), advance(compressed, fresh, rotary)),
    )
    untouched = {name: value.clone() for name, value in dense.state_dict().items()}
    fractions: list[float] = []
    report = refine(
        compressed, Streams(hidden, ours, rotary), targets, course(30, 3e-3), 0, torch.float32, fractions.append
    )
    assert sum(fractions) == pytest.approx(1)
    assert report["loss_after"] < 0.95 * report["loss_before"]
    assert relative(advance(dense, fresh, rotary), advance(compressed, fresh, rotary)) < 0.95 * before
    assert all(torch.equal(value, untouched[name]) for name, value in dense.state_dict().items())
    assert isinstance(compressed.get_submodule("mlp.gate_proj"), LowRankLinear)
    assert not torch.equal(compressed.input_layernorm.weight, dense.input_layernorm.weight)
    assert compressed.get_submodule("mlp.down_proj").weight is dense.get_submodule("mlp.down_proj").weight


def test_the_gain_does_not_depend_on_the_size_of_the_weights(case) -> None:
    """Weights divided by 1024 behind norms times 1024 are the same layer."""
    dense, compressed, hidden, ours, rotary = case
    targets = advance(dense, hidden, rotary)
    smaller = copy.deepcopy(compressed)
    with torch.no_grad():
        for norm, linears in READERS.items():
            smaller.get_submodule(norm).weight.mul_(1024)
            for name in linears:
                smaller.get_submodule(name).B.weight.div_(1024)
    plain, scaled = (
        refine(layer, Streams(hidden, ours, rotary), targets, course(8, 0.03), 0, torch.float32, ignore)
        for layer in (compressed, smaller)
    )
    assert scaled["loss_before"] == pytest.approx(plain["loss_before"], rel=1e-4)
    gains = [1 - report["loss_after"] / report["loss_before"] for report in (plain, scaled)]
    assert gains[0] > 0.02
    assert gains[1] == pytest.approx(gains[0], rel=0.3)  # the common limit of the gradient weighs them differently


def test_rates_follow_the_size_of_the_parameters_and_the_loss(case, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, compressed, hidden, ours, rotary = case
    seen: list[Objective] = []

    def record(objective: Objective, *_: object, **__: object) -> Trained:
        seen.append(objective)
        return Trained([objective.validate()], 0.0, 0.0)

    monkeypatch.setattr(refine_module, "train", record)
    targets = advance(dense, hidden, rotary)
    for inputs in (ours, hidden + 0.3 * torch.randn_like(hidden), 100 * hidden):
        report = refine(compressed, Streams(hidden, inputs, rotary), targets, course(1, 1.0), 0, torch.float32, ignore)
        error = min(1.0, math.sqrt(report["loss_before"]))
        sizes = [float(parameter.square().mean().sqrt()) for parameter in seen[-1].parameters]
        assert seen[-1].scales == pytest.approx([error * size for size in sizes])
    assert report["loss_before"] > 1


def test_a_scale_multiplies_the_rate_of_its_parameter() -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    losses = iter([1.0, 0.5])
    objective = Objective(
        parameters,
        torch.arange(1),
        lambda _: sum(parameter.sum() for parameter in parameters).backward(),
        lambda: next(losses),
        [1.0, 0.01],
    )
    train(objective, Course(1, 0.1, 0.0, (0.9, 0.95)), 1, torch.Generator(), ignore)
    # the first step of AdamW is the rate, against the gradient's sign
    assert torch.allclose(parameters[0], torch.full((3,), -0.1)) and torch.allclose(parameters[1], torch.tensor(-1e-3))


def straight(losses: Sequence[float]) -> tuple[nn.Parameter, Objective]:
    """Return a parameter whose gradient is always the same, and an objective with these held-out losses."""
    parameter, values = nn.Parameter(torch.zeros(1)), iter(losses)
    objective = Objective([parameter], torch.arange(1), lambda _: parameter.sum().backward(), lambda: next(values))
    return parameter, objective


@pytest.mark.parametrize(
    ("losses", "end"),
    [
        ((1.0, 0.9, 0.8, 0.7), -0.2),
        ((1.0, 1.0, 0.8, 0.7), -0.2),  # no worse, so it goes on
        ((1.0, 2.0, 0.8, 0.7), -0.05),
        ((1.0, 0.9, 0.95, 0.7), -0.1125),
    ],
)
def test_an_epoch_that_raises_the_loss_is_undone_and_halves_the_rate(
    tmp_path: Path, losses: Sequence[float], end: float
) -> None:
    schedule = Course(3, 0.1, 0.0, (0.9, 0.95))  # one step per epoch, at 1, 3/4 and 1/4 of the rate
    parameter, objective = straight(losses)
    train(objective, schedule, 1, torch.Generator(), ignore)
    assert parameter.item() == pytest.approx(end)

    file, again = tmp_path / "state.safetensors", torch.Generator()
    _, interrupted = straight(losses[:2])
    with pytest.raises(StopIteration):
        train(interrupted, schedule, 1, again, ignore, file=file)
    resumed, objective = straight(losses[2:])
    done = train(objective, schedule, 1, again, ignore, file=file)
    assert torch.equal(resumed, parameter) and done.losses == list(losses)


def test_a_loss_that_is_not_a_number_ends_the_training_at_the_best_values() -> None:
    parameter, objective = straight((1.0, 0.9, math.nan))
    done = train(objective, Course(3, 0.1, 0.0, (0.9, 0.95)), 1, torch.Generator(), ignore)
    assert parameter.item() == pytest.approx(-0.1) and done.losses[:2] == [1.0, 0.9] and len(done.losses) == 3


def test_training_that_does_not_help_leaves_the_layer_unchanged(case) -> None:
    dense, compressed, hidden, _, rotary = case
    before = {name: value.clone() for name, value in compressed.state_dict().items()}
    report = refine(
        compressed,
        Streams(hidden, hidden, rotary),
        advance(dense, hidden, rotary),
        course(5, 1e3),
        0,
        torch.float32,
        ignore,
    )
    assert report["loss_after"] == report["loss_before"] and report["epochs"] < 5
    assert all(torch.equal(value, before[name]) for name, value in compressed.state_dict().items())


def test_one_row_is_enough_and_nan_is_refused(case) -> None:
    dense, compressed, hidden, _, rotary = case
    targets = advance(dense, hidden, rotary)
    report = refine(
        compressed, Streams(hidden, hidden[:1], rotary), targets[:1], course(1, 1e-3), 0, torch.float32, ignore
    )
    assert report["loss_after"] <= report["loss_before"]
    damaged = Streams(hidden, hidden * float("nan"), rotary)
    with pytest.raises(ValueError, match="not a number"):
        refine(compressed, damaged, targets, course(1, 1e-3), 0, torch.float32, ignore)
