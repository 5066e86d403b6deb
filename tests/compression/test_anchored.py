"""The anchored objective, and the order in which the linears of a layer are factorised."""

from __future__ import annotations

import copy

import pytest
import torch
from brute_force import least
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from draws import examples
from neuronmm.compression.anchored import Anchors
from neuronmm.compression.anchored_layer import anchored_factors
from neuronmm.compression.factorize import factorize
from neuronmm.compression.layer_pair import LayerPair
from neuronmm.compression.moments import Moments
from neuronmm.compression.ranks import Linear
from neuronmm.compression.streaming import Streams, run_layer
from neuronmm.models.families import TARGETS
from tiny_models import make_tiny


def draw(out: int, into: int, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight [out, in], dense inputs [in, tokens] with a dead and a massive feature, and the compressed model's."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, into, generator=generator, dtype=torch.float64)
    dense = torch.randn(into, tokens, generator=generator, dtype=torch.float64)
    dense[0] = 0
    dense[-1] *= 30
    return weight, dense, dense + 0.3 * torch.randn(into, tokens, generator=generator, dtype=torch.float64)


def gather(weight: Tensor, dense: Tensor, ours: Tensor, damping: float, wanted: Tensor | None = None) -> Anchors:
    """The sums over dense inputs, or over the targets ``wanted`` [out, tokens]."""
    sums = Anchors(weight.shape[1], damping, None if wanted is None else len(wanted))
    sums.add((dense if wanted is None else wanted).T, ours.T)
    return sums.of(float((weight @ dense if wanted is None else wanted).square().sum()))


def objective(weight: Tensor, product: Tensor, wanted: Tensor, ours: Tensor, damping: float) -> float:
    """``||T - W' X'||^2 + lambda ||W - W'||^2``, directly."""
    return float((wanted - product @ ours).square().sum() + damping * (weight - product).square().sum())


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
    weight, dense, ours = draw(out, into, tokens, seed)
    wanted = weight @ dense + stream * torch.randn(out, tokens, dtype=torch.float64)
    anchors = gather(weight, dense, ours, 1e-3, wanted if stream else None)
    factors = factorize(weight, 1 + int(fraction * (min(out, into) - 1)), anchors)
    direct = objective(weight, factors.B @ factors.A, wanted, ours, anchors.damping)
    assert factors.loss == pytest.approx(direct, rel=1e-6, abs=1e-7 * factors.energy)
    zero = objective(weight, torch.zeros_like(weight), wanted, ours, anchors.damping)
    assert factors.energy == pytest.approx(zero, rel=1e-9)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("out", "into"), [(10, 16), (16, 10)])
def test_no_other_matrix_of_the_rank_does_better(out: int, into: int, stream: bool) -> None:
    """Gradient descent on random factors never gets below the closed form, and comes close to it."""
    weight, dense, ours = draw(out, into, 40, 3)
    wanted = weight @ dense + stream * torch.randn(out, 40, dtype=torch.float64)
    anchors = gather(weight, dense, ours, 1e-3, wanted if stream else None)
    best = factorize(weight, 4, anchors).loss

    def loss(product: Tensor) -> Tensor:
        fit = (wanted - product @ ours).square().sum()
        return fit + anchors.damping * (weight - product).square().sum()

    found = least(loss, out, into, 4)
    assert best * (1 - 1e-9) <= found <= best * 1.05


@pytest.mark.parametrize(("out", "into"), [(12, 20), (20, 12)])
def test_with_the_dense_models_own_inputs_it_is_the_whitened_form(out: int, into: int) -> None:
    weight, dense, _ = draw(out, into, 60, 1)
    anchors = gather(weight, dense, dense, 1e-3)
    moments = Moments(into, True, 1e-3)
    moments.add(dense.T, (weight @ dense).T)
    ours, theirs = factorize(weight, 5, anchors), factorize(weight, 5, moments)
    torch.testing.assert_close(ours.B @ ours.A, theirs.B @ theirs.A, rtol=1e-6, atol=1e-6)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)


def test_no_tokens_that_say_anything_and_bad_numbers() -> None:
    weight, dense, ours = draw(8, 6, 10, 0)
    factors = factorize(weight, 6, gather(weight, 0 * dense, 0 * ours, 1e-3))
    torch.testing.assert_close(factors.B @ factors.A, weight, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="activations contain NaN"):
        factorize(weight, 2, gather(weight, dense * float("nan"), ours, 1e-3))
    with pytest.raises(ValueError, match="activations contain NaN"):
        factorize(weight, 2, gather(weight, dense, ours * float("nan"), 1e-3))


INSIDE = "model.layers.0."


@pytest.mark.parametrize("targets", ["mlp", "attention", "all"])
def test_each_linear_reads_what_those_before_it_wrote_and_the_stream_is_aimed_at(targets: str) -> None:
    torch.manual_seed(0)
    model = make_tiny("qwen2").model
    dense = model.layers[0].requires_grad_(False)
    pair = LayerPair(dense, INSIDE)
    compressed = pair.compressed = copy.deepcopy(dense)
    theirs = torch.randn(3, 8, 32)
    ours = theirs + 0.1 * torch.randn_like(theirs)
    rotary = model.rotary_emb(theirs, torch.arange(8)[None])
    linears = [Linear(INSIDE + name, *dense.get_submodule(name).weight.shape) for name in TARGETS[targets]]
    order = list[str]()

    def take(linear: Linear, known: Anchors) -> None:
        """Compare with the layers' own whole runs at this moment; then halve the rank of the weight."""
        name = linear.name.removeprefix(INSIDE)
        order.append(name)
        (x, y, stream), (read, _, ours_) = (watch(layer, name, inputs) for layer, inputs in pairs)
        writes = name in ("self_attn.o_proj", "mlp.down_proj")
        wanted = y + stream - ours_ if writes else x
        torch.testing.assert_close(known.gram, read.T @ read, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(known.cross, wanted.T @ read, rtol=1e-5, atol=1e-5)
        assert known.power == pytest.approx(float((wanted if writes else y).square().sum()), rel=1e-5)
        target = compressed.get_submodule(name)
        factors = factorize(target.weight, min(target.weight.shape) // 2, known)
        target.weight.copy_(factors.B @ factors.A)

    def watch(layer: nn.Module, name: str, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Input and output without bias of a linear, and the stream that the output is added to, float64."""
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

    pairs = ((dense, theirs), (compressed, ours))
    outputs = anchored_factors(pair, Streams(theirs, ours, rotary), linears, 1e-3, take)
    torch.testing.assert_close(outputs, run_layer(dense, theirs, rotary))
    assert order == list(TARGETS[targets])
