"""Training a compressed layer against the dense one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from neuronmm.compression.block import advance, moments_of, swap, unshared, weight_of
from neuronmm.compression.factorize import factorize
from neuronmm.compression.ranks import Linear
from neuronmm.compression.refine import refine
from neuronmm.compression.training import Course
from neuronmm.models import LowRankLinear
from neuronmm.models.families import TARGETS
from tiny_models import make_tiny

INSIDE = "layer."


@pytest.fixture
def case() -> tuple[nn.Module, nn.Module, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """A dense layer, its compressed form, inputs of both [rows, length, hidden], and rotary's cos and sin."""
    torch.manual_seed(0)
    model = make_tiny("qwen2").model
    dense = model.layers[0].requires_grad_(False)
    hidden = torch.randn(16, 24, 32)
    rotary = model.rotary_emb(hidden, torch.arange(24)[None])
    linears = [
        Linear(INSIDE + name, *dense.get_submodule(name).weight.shape) for name in TARGETS["all"] if "down" not in name
    ]
    compressed = unshared(dense)
    names = [linear.name.removeprefix(INSIDE) for linear in linears]
    moments, _ = moments_of(dense, hidden, rotary, names, 1e-3)
    for linear, name in zip(linears, names, strict=True):
        factors = factorize(weight_of(dense, linear, INSIDE), 6, moments[name])
        swap(compressed, linear, factors, INSIDE, torch.float32)
    return dense, compressed, hidden, hidden + 0.05 * torch.randn_like(hidden), rotary


def course(epochs: int, rate: float) -> Course:
    return Course(epochs, rate, 0.05, (0.9, 0.95))


def relative(wanted: Tensor, got: Tensor) -> float:
    return float(((got - wanted).square().sum(-1) / wanted.square().sum(-1)).mean())


def test_it_gets_nearer_to_the_dense_layer_on_tokens_it_has_not_seen(case) -> None:
    dense, compressed, hidden, ours, rotary = case
    fresh = torch.randn(8, 24, 32)
    targets, before = (
        advance(dense, hidden, rotary),
        relative(advance(dense, fresh, rotary), advance(compressed, fresh, rotary)),
    )
    untouched = {name: value.clone() for name, value in dense.state_dict().items()}
    shares: list[float] = []
    report = refine(compressed, ours, targets, rotary, course(30, 3e-3), 0, torch.float32, shares.append)
    assert sum(shares) == pytest.approx(1)
    assert report["loss_after"] < 0.95 * report["loss_before"]
    assert relative(advance(dense, fresh, rotary), advance(compressed, fresh, rotary)) < 0.95 * before
    assert all(torch.equal(value, untouched[name]) for name, value in dense.state_dict().items())
    assert isinstance(compressed.get_submodule("mlp.gate_proj"), LowRankLinear)
    assert not torch.equal(compressed.input_layernorm.weight, dense.input_layernorm.weight)
    assert compressed.get_submodule("mlp.down_proj").weight is dense.get_submodule("mlp.down_proj").weight


def test_training_that_does_not_help_leaves_the_layer_as_it_was(case) -> None:
    dense, compressed, hidden, _, rotary = case
    before = {name: value.clone() for name, value in compressed.state_dict().items()}
    report = refine(
        compressed,
        hidden,
        advance(dense, hidden, rotary),
        rotary,
        course(5, 1e3),
        0,
        torch.float32,
        lambda share: None,
    )
    assert report["loss_after"] == report["loss_before"] and report["epochs"] < 5
    assert all(torch.equal(value, before[name]) for name, value in compressed.state_dict().items())


def test_one_row_is_enough_and_bad_numbers_are_refused(case) -> None:
    dense, compressed, hidden, _, rotary = case
    targets = advance(dense, hidden, rotary)
    report = refine(compressed, hidden[:1], targets[:1], rotary, course(1, 1e-3), 0, torch.float32, lambda share: None)
    assert report["loss_after"] <= report["loss_before"]
    with pytest.raises(ValueError, match="not a number"):
        refine(
            compressed, hidden * float("nan"), targets, rotary, course(1, 1e-3), 0, torch.float32, lambda share: None
        )
