"""A whole model in int8 against its dequantised twin."""

from __future__ import annotations

import copy

import pytest
import torch

from neuronmm.engine.cpu_decoder import CpuDecoder, describe
from neuronmm.engine.decoder import TorchDecoder
from neuronmm.kernels.cpu import core
from neuronmm.kernels.cpu.int8 import quantise_model
from neuronmm.kernels.int8 import Int8, quantise
from neuronmm.models.families import FAMILIES, TARGETS
from tiny_models import compress_tiny, fill_tiny, layer_ranks, make_tiny, make_tokens, shared_spec

built = pytest.mark.skipif(core() is None, reason="the C++ core is not built")


def dequantise(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of the model with every matrix rounded to int8 and dequantised."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(quantise(parameter).dequantise(parameter.dtype))
    return model


@built
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("linears", [(), TARGETS["mlp"]], ids=["dense", "factors"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_model_in_int8_equals_the_model_of_its_rounded_weights(
    model_type: str, linears: tuple[str, ...], tied: bool, batch: int
) -> None:
    """The rounding of the weights is the only error; otherwise both agree to fp32 accuracy."""
    model = make_tiny(model_type, tied=tied)
    if linears:
        compress_tiny(model, layer_ranks(linears))
    twin = dequantise(model)
    exact, ids = TorchDecoder(twin, batch, 20), make_tokens(batch)
    rounded = CpuDecoder(twin, batch, 20, quantise_model(describe(model, 20)))
    mask = torch.ones_like(ids)
    logits, expected = rounded.prefill(ids, mask), exact.prefill(ids, mask)
    for _ in range(8):
        token = expected.argmax(-1)
        logits, expected = rounded.decode(token), exact.decode(token)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@built
def test_every_matrix_is_quantised_once_and_a_tied_head_stays_tied() -> None:
    model = make_tiny("llama", tied=True)
    compress_tiny(model, layer_ranks())
    weights = quantise_model(describe(model, 8))
    assert isinstance(weights.embedding, Int8)
    assert weights.head.A is weights.embedding
    for layer in weights.layers:
        for part in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down):
            assert isinstance(part.A, Int8)
            assert part.B is None or isinstance(part.B, Int8)
    assert quantise_model(weights).embedding is weights.embedding


@built
def test_a_shared_matrix_stays_shared() -> None:
    model = make_tiny("qwen2")
    fill_tiny(model, shared_spec())
    for layer in quantise_model(describe(model, 8)).layers:
        assert layer.up.A is layer.gate.A and layer.k.A is layer.q.A and layer.v.A is layer.q.A
        assert layer.o.B is None and layer.down.A is not layer.gate.A
