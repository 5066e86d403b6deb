"""The anchored objective, and the order in which the linears of a layer are factorised."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from brute_force import least
from draws import examples
from neuronmm.compression import anchored
from neuronmm.compression.anchored import Anchors
from neuronmm.compression.anchored_layer import anchored_factors
from neuronmm.compression.factorize import factorize
from neuronmm.compression.layer_pair import LayerPair
from neuronmm.compression.moments import Moments
from neuronmm.compression.ranks import Linear
from neuronmm.compression.streaming import Streams, run_layer
from neuronmm.models.families import TARGETS
from tiny_models import make_tiny


@pytest.fixture(autouse=True, scope="module")
def narrow_stripes() -> Iterator[None]:
    """Let these small Gram matrices have several stripes, the last of them shorter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anchored, "_STRIPE", 7)
        yield


def draw(out: int, into: int, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight [out, in], dense inputs [in, tokens] with a dead and a massive feature, and compressed inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, into, generator=generator, dtype=torch.float64)
    dense = torch.randn(into, tokens, generator=generator, dtype=torch.float64)
    dense[0] = 0
    dense[-1] *= 30
    return weight, dense, dense + 0.3 * torch.randn(into, tokens, generator=generator, dtype=torch.float64)


def gather(weight: Tensor, dense: Tensor, compressed: Tensor, damping: float, targets: Tensor | None = None) -> Anchors:
    """Return the sums over dense inputs, or over ``targets`` [out, tokens]."""
    sums = Anchors(weight.shape[1], damping, None if targets is None else len(targets))
    sums.add((dense if targets is None else targets).T, compressed.T)
    return sums.of(float((weight @ dense if targets is None else targets).square().sum()))


def objective(weight: Tensor, product: Tensor, targets: Tensor, compressed: Tensor, damping: float) -> float:
    """Compute ``||T - W' X'||^2 + lambda ||W - W'||^2`` directly."""
    return float((targets - product @ compressed).square().sum() + damping * (weight - product).square().sum())


@examples(60)
@given(
    sizes=st.tuples(st.integers(2, 30), st.integers(2, 30), st.integers(1, 50)),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 99),
    stream=st.booleans(),
)
def test_the_reported_loss_is_the_objective(
    sizes: tuple[int, int, int], fraction: float, seed: int, stream: bool
) -> None:
    out, into, tokens = sizes
    weight, dense, compressed = draw(out, into, tokens, seed)
    targets = weight @ dense + stream * torch.randn(out, tokens, dtype=torch.float64)
    anchors = gather(weight, dense, compressed, 1e-3, targets if stream else None)
    factors = factorize(weight, 1 + int(fraction * (min(out, into) - 1)), anchors)
    direct = objective(weight, factors.B @ factors.A, targets, compressed, anchors.damping)
    assert factors.loss == pytest.approx(direct, rel=1e-6, abs=1e-7 * factors.energy)
    zero = objective(weight, torch.zeros_like(weight), targets, compressed, anchors.damping)
    assert factors.energy == pytest.approx(zero, rel=1e-9)
    half = min(out, into) // 2
    if half:
        error = factorize(weight, half, anchors).relative_error
        assert factors.spectrum[7] == pytest.approx(error, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("out", "into"), [(10, 16), (16, 10)])
def test_gradient_descent_finds_no_better_matrix_of_the_rank(out: int, into: int, stream: bool) -> None:
    """Gradient descent from random factors comes close to the closed form and never below it."""
    weight, dense, compressed = draw(out, into, 40, 3)
    targets = weight @ dense + stream * torch.randn(out, 40, dtype=torch.float64)
    anchors = gather(weight, dense, compressed, 1e-3, targets if stream else None)
    best = factorize(weight, 4, anchors).loss

    def loss(product: Tensor) -> Tensor:
        fit = (targets - product @ compressed).square().sum()
        return fit + anchors.damping * (weight - product).square().sum()

    descended = least(loss, out, into, 4)
    assert best * (1 - 1e-9) <= descended <= best * 1.05


@pytest.mark.parametrize(("out", "into"), [(12, 20), (20, 12)])
def test_with_dense_inputs_it_equals_the_whitened_form(out: int, into: int) -> None:
    weight, dense, _ = draw(out, into, 60, 1)
    anchors = gather(weight, dense, dense, 1e-3)
    moments = Moments(into, True, 1e-3)
    moments.add(dense.T, (weight @ dense).T)
    ours, whitened = factorize(weight, 5, anchors), factorize(weight, 5, moments)
    torch.testing.assert_close(ours.B @ ours.A, whitened.B @ whitened.A, rtol=1e-6, atol=1e-6)
    assert ours.loss == pytest.approx(whitened.loss, rel=1e-6)


def test_all_zero_inputs_are_factorised_and_nan_is_refused() -> None:
    weight, dense, compressed = draw(8, 6, 10, 0)
    factors = factorize(weight, 6, gather(weight, 0 * dense, 0 * compressed, 1e-3))
    torch.testing.assert_close(factors.B @ factors.A, weight, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="activations contain NaN"):
        factorize(weight, 2, gather(weight, dense * float("nan"), compressed, 1e-3))
    with pytest.raises(ValueError, match="activations contain NaN"):
        factorize(weight, 2, gather(weight, dense, compressed * float("nan"), 1e-3))


INSIDE = "model.layers.0."


@pytest.mark.parametrize("targets", ["mlp", "attention", "all"])
def test_each_linear_gets_compressed_inputs_and_the_target_is_the_dense_stream(targets: str) -> None:
    torch.manual_seed(0)
    model = make_tiny("qwen2").model
    dense = model.layers[0].requires_grad_(False)
    pair = LayerPair(dense, INSIDE)
    compressed = pair.compressed = copy.deepcopy(dense)
    dense_hidden = torch.randn(3, 8, 32)
    compressed_hidden = dense_hidden + 0.1 * torch.randn_like(dense_hidden)
    rotary = model.rotary_emb(dense_hidden, torch.arange(8)[None])
    linears = [Linear(INSIDE + name, *dense.get_submodule(name).weight.shape) for name in TARGETS[targets]]
    order = list[str]()

    def take(linear: Linear, sums: Anchors) -> None:
        """Compare with full runs of both layers; then halve the rank of the compressed weight."""
        name = linear.name.removeprefix(INSIDE)
        order.append(name)
        (x, y, stream), (read, _, compressed_stream) = (watch(layer, name, inputs) for layer, inputs in pairs)
        writes = name in ("self_attn.o_proj", "mlp.down_proj")
        targets = y + stream - compressed_stream if writes else x
        torch.testing.assert_close(sums.gram.tril(), (read.T @ read).tril(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums.cross, targets.T @ read, rtol=1e-5, atol=1e-5)
        assert sums.power == pytest.approx(float((targets if writes else y).square().sum()), rel=1e-5)
        target = compressed.get_submodule(name)
        factors = factorize(target.weight, min(target.weight.shape) // 2, sums)
        target.weight.copy_(factors.B @ factors.A)

    def watch(layer: nn.Module, name: str, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return input and output (without bias) of a linear, and the stream that the output is added to, float64."""
        seen: dict[str, Tensor] = {}
        norm = "input_layernorm" if "attn" in name else "post_attention_layernorm"
        linear = layer.get_submodule(name)
        hooks = [
            linear.register_forward_pre_hook(lambda _, args: seen.update(x=args[0])),
            layer.get_submodule(norm).register_forward_pre_hook(lambda _, args: seen.update(stream=args[0])),
        ]
        run_layer(layer, inputs, rotary)
        for hook in hooks:
            hook.remove()
        x, stream = (seen[key].flatten(0, -2).double() for key in ("x", "stream"))
        return x, x @ linear.weight.double().T, stream

    pairs = ((dense, dense_hidden), (compressed, compressed_hidden))
    outputs = anchored_factors(pair, Streams(dense_hidden, compressed_hidden, rotary), linears, 1e-3, take)
    torch.testing.assert_close(outputs, run_layer(dense, dense_hidden, rotary))
    assert order == list(TARGETS[targets])
