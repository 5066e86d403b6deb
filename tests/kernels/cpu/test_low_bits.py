"""A whole model of few bits on the core against its dequantised twin in torch."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
import torch

from core_decoding import assert_decodes_within_the_rule, assert_reads_prompts, drawn, needs_core
from few_bits import quantise_model
from neuronmm.engine.cpu_decoder import CpuDecoder, describe, refuses
from neuronmm.engine.decoder import TorchDecoder
from neuronmm.kernels import Int8, KernelError, quantise_int4
from neuronmm.kernels.cpu.step import DecodeStep
from neuronmm.models import Int8Embedding, quantise_weights
from neuronmm.models.families import FAMILIES
from neuronmm.models.low_bits import LowBitsModule, WeightDtype
from tiny_models import fill_tiny, make_tiny, make_tokens, pivoted_spec, shared_spec, vary_norms

pytestmark = needs_core

ROUNDED = get_args(WeightDtype)
SPECS = {
    "dense": None,
    "shared A": shared_spec(),
    "pivoted": pivoted_spec(),
    "int8 factors": shared_spec(factors="int8"),
    "int4 factors": shared_spec(factors="int4", format=3),
}


def rounded_and_twin(model_type: str, spec: str, dtype: WeightDtype, tied: bool = False) -> tuple[Any, Any]:
    """Return a model of few bits, and the same with ordinary modules of the dequantised values."""
    model = vary_norms(make_tiny(model_type, tied=tied))
    if SPECS[spec]:
        fill_tiny(model, SPECS[spec])
    twin = copy.deepcopy(model)
    quantise_weights(model, dtype)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, LowBitsModule) and not name.endswith((".A", ".B")):
                twin.get_submodule(name).weight.copy_(module.matrix.dequantise(torch.float32))
    return model, twin


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_core_and_torch_compute_the_rounded_model(
    model_type: str, spec: str, dtype: WeightDtype, tied: bool, batch: int
) -> None:
    """In float32. Int4 also rounds the activations of a linear to 16 bits, which is off by 3e-4 of their norm."""
    model, twin = rounded_and_twin(model_type, spec, dtype, tied)
    assert refuses(model, batch) is None
    rounded, in_torch, exact = (
        CpuDecoder(model, batch, 20),
        TorchDecoder(model, batch, 20),
        TorchDecoder(twin, batch, 20),
    )
    ids = make_tokens(batch)
    mask = torch.ones_like(ids)
    logits, expected = rounded.prefill(ids, mask), exact.prefill(ids, mask)
    torch.testing.assert_close(in_torch.prefill(ids, mask), expected, rtol=1e-5, atol=1e-5)
    for _ in range(8):
        token = expected.argmax(-1)
        logits, expected = rounded.decode(token), exact.decode(token)
        if "int4" in (dtype, spec.partition(" ")[0]):
            assert (logits - expected).norm() <= 4e-4 * expected.norm()
        else:
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_ties_and_shared_factors_stay(dtype: WeightDtype) -> None:
    model, _ = rounded_and_twin("llama", "shared A", dtype, tied=True)
    weights = describe(model, 8)
    assert isinstance(model.get_input_embeddings(), Int8Embedding) and isinstance(weights.embedding, Int8)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert isinstance(weights.head.A, Int8) and weights.head.A.values is weights.embedding.values
    for layer in weights.layers:
        assert layer.up.A is layer.gate.A and layer.gate.A.dtype == torch.float32  # factors stay as they are
        assert type(layer.o.A).__name__.lower() == dtype


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", ROUNDED)
def test_bf16_keeps_the_rule(spec: str, dtype: WeightDtype, isa: str) -> None:
    def twins() -> tuple[torch.nn.Module, torch.nn.Module]:
        model = rounded_and_twin("llama", spec, dtype)[0].bfloat16()
        return model, copy.deepcopy(model).float()

    models = list(drawn(4, twins))
    assert_decodes_within_the_rule(*models[0])
    if isa != "portable":
        assert_reads_prompts(models, 2, 24)


def test_an_embedding_in_int4_is_refused() -> None:
    model = make_tiny("llama")
    weights = quantise_model(describe(model, 8))
    caches = [torch.zeros(1, 2, 8, 8) for _ in weights.layers]
    table = quantise_int4(model.get_input_embeddings().weight)
    with pytest.raises(KernelError, match="an embedding in int4"):
        DecodeStep(type(weights)(**{**vars(weights), "embedding": table}), caches, caches)
