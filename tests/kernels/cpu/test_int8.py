"""Int8 weights: the rounding itself, its bound through a linear, and a whole model against its dequantised twin."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuronmm.engine.cpu_decoder import CpuDecoder, describe
from neuronmm.engine.decoder import TorchDecoder
from neuronmm.kernels.cpu import core
from neuronmm.kernels.cpu.int8 import quantize, quantize_model
from neuronmm.kernels.cpu.step import Int8
from neuronmm.models.families import FAMILIES, TARGETS
from tiny import compress_tiny, layer_ranks, make_tiny, make_tokens

built = pytest.mark.skipif(core() is None, reason="the C++ core is not built")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(-20, 20), st.sampled_from([torch.float32, torch.bfloat16]))
def test_no_element_is_off_by_more_than_half_a_step(rows: int, cols: int, power: int, dtype: torch.dtype) -> None:
    weight = (torch.randn(rows, cols) * 2.0**power).to(dtype)
    weight[0] = 0
    values, steps = quantize(weight)
    wide = weight.double()
    assert torch.equal(steps, (wide.abs().amax(1) / 127).float())
    # Half a step, and the fp32 rounding of up to 127 steps.
    bound = (0.5 + 127 * 2.0**-22) * steps[:, None].double()
    assert ((values.double() * steps[:, None].double() - wide).abs() <= bound).all()
    assert values.abs().max() <= 127


def dequantise(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with every matrix replaced by what int8 makes of it."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                values, steps = quantize(parameter)
                parameter.copy_(values * steps[:, None])
    return model


@built
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("linears", [(), TARGETS["mlp"]], ids=["dense", "factors"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_model_in_int8_is_the_model_of_its_rounded_weights(
    model_type: str, linears: tuple[str, ...], tied: bool, batch: int
) -> None:
    """The rounding of the weights is the only error: the rest agrees to fp32 accuracy."""
    model = make_tiny(model_type, tied=tied)
    if linears:
        compress_tiny(model, layer_ranks(linears))
    twin = dequantise(model)
    exact, ids = TorchDecoder(twin, batch, 20), make_tokens(batch)
    rounded = CpuDecoder(twin, batch, 20, quantize_model(describe(model, 20)))
    mask = torch.ones_like(ids)
    logits, expected = rounded.prefill(ids, mask), exact.prefill(ids, mask)
    for _ in range(8):
        token = expected.argmax(-1)
        logits, expected = rounded.decode(token), exact.decode(token)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@built
def test_every_matrix_is_int8_once_and_a_tied_head_stays_tied() -> None:
    model = make_tiny("llama", tied=True)
    compress_tiny(model, layer_ranks())
    weights = quantize_model(describe(model, 8))
    assert isinstance(weights.embedding, Int8)
    assert weights.head.A is weights.embedding
    for layer in weights.layers:
        for part in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down):
            assert isinstance(part.A, Int8)
            assert part.B is None or isinstance(part.B, Int8)
    assert quantize_model(weights).embedding is weights.embedding
