"""One layer's linears in the order they run: what each one's factors are made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from neuronmm.compression.anchored import Anchors
from neuronmm.compression.factorize import factorize
from neuronmm.compression.ranks import Linear
from neuronmm.compression.sequential import anchored_factors
from neuronmm.compression.streaming import run_layer
from neuronmm.models.families import TARGETS
from tiny_models import make_tiny

INSIDE = "model.layers.0."


@pytest.mark.parametrize("targets", ["mlp", "attention", "all"])
def test_each_linear_reads_what_those_before_it_wrote_and_the_stream_is_aimed_at(targets: str) -> None:
    torch.manual_seed(0)
    model = make_tiny("qwen2").model
    dense = model.layers[0].requires_grad_(False)
    compressed = copy.deepcopy(dense)
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
    outputs = anchored_factors(dense, compressed, (theirs, ours), rotary, linears, INSIDE, 1e-3, take)
    torch.testing.assert_close(outputs, run_layer(dense, theirs, rotary))
    assert order == list(TARGETS[targets])
