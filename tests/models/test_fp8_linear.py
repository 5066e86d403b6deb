"""fp8 factors: stored as Trainium reads them, computed in the model's precision, with the features of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from compression_runs import edit_tensors
from neuronmm.engine.backends.cpu import load
from neuronmm.engine.decoder import TorchDecoder
from neuronmm.kernels import KernelError
from neuronmm.kernels.cpu.library import FP8_FACTORS
from neuronmm.models import UserError, fuse
from neuronmm.models.fp8 import Fp8Linear
from neuronmm.models.load import load_pretrained
from neuronmm.models.neuronx.checkpoint import Checkpoint
from tiny_models import fill_tiny, load_plain, logits, make_tiny, specs_of, write_checkpoint

SPECS = specs_of("fp8")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UP = "model.layers.0.mlp.up_proj.B.weight"


def fp8_checkpoint(folder: Path, kind: str = "own A", **kwargs: Any) -> PreTrainedModel:
    """Write a checkpoint with fp8 factors, and return the patched model."""
    model = make_tiny("qwen2", **kwargs)
    write_checkpoint(model, fill_tiny(model, SPECS[kind]), folder)
    return model


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one dtype and the same bits; torch compares no fp8."""
    return a.dtype == b.dtype and torch.equal(*(t.contiguous().view(torch.uint8) for t in (a, b)))


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    model = fp8_checkpoint(tmp_path / "one", kind, dtype=dtype)
    stored = load_file(tmp_path / "one" / "model.safetensors")
    assert stored[UP].dtype == torch.float8_e4m3fn and stored[f"{UP}_scale"].dtype == torch.float32
    loaded = load_plain(tmp_path / "one", dtype=dtype)
    weights = loaded.state_dict()
    assert all(same(weights[name], tensor) for name, tensor in stored.items())
    assert torch.equal(logits(loaded), logits(model))
    factors = [m for m in loaded.modules() if isinstance(m, Fp8Linear)]
    assert factors and not any(p.requires_grad for m in factors for p in (m.weight, m.weight_scale))
    for module in factors:
        weight = (module.weight.float() * module.weight_scale[:, None]).to(dtype)
        x = torch.randn(3, module.in_features, dtype=dtype)
        assert torch.equal(module(x), torch.nn.functional.linear(x, weight, module.bias))
    loaded.save_pretrained(tmp_path / "two")
    again = load_file(tmp_path / "two" / "model.safetensors")
    assert again.keys() == stored.keys() and all(same(again[name], stored[name]) for name in stored)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_factors_are_not_converted_with_the_model(dtype: torch.dtype, tmp_path: Path) -> None:
    model = fp8_checkpoint(tmp_path)
    factors = {name: p for name, p in model.named_parameters() if ".A.weight" in name or ".B.weight" in name}
    for other in (
        load_plain(tmp_path, dtype=dtype),
        load_plain(tmp_path).to(dtype),
        load_plain(tmp_path).to(dtype).float(),
    ):
        there = dict(other.named_parameters())
        assert all(same(there[name], p) for name, p in factors.items())


@pytest.mark.parametrize("impl", ["auto", "torch", "naive"])
@pytest.mark.parametrize("kind", SPECS)
def test_a_fused_model_gives_the_same_logits(kind: str, impl: str) -> None:
    model = make_tiny("qwen2")
    fill_tiny(model, SPECS[kind])
    expected = logits(model)
    assert torch.allclose(logits(fuse(model, impl)), expected, rtol=1e-4, atol=1e-4)


def test_the_core_refuses_and_torch_decodes(tmp_path: Path) -> None:
    fp8_checkpoint(tmp_path)
    with pytest.raises(KernelError, match=FP8_FACTORS) as caught:
        load(tmp_path, torch.float32, "cpu").decoder(1, 16)
    assert "\n" not in str(caught.value)
    runner = load(tmp_path, torch.float32, "auto")
    assert type(runner.decoder(1, 16)) is TorchDecoder and runner.path.endswith(", fp8")


def test_a_neuron_host_reads_what_the_bits_stand_for(tmp_path: Path) -> None:
    model = fp8_checkpoint(tmp_path, dtype=torch.bfloat16)
    read = Checkpoint(tmp_path, torch.bfloat16).tensor(UP)
    assert torch.equal(read, model.get_submodule(UP.removesuffix(".weight")).matrix.dequantise(torch.bfloat16))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(f"{UP}_scale"), r"up_proj\.B\.weight_scale is in no shard"),
        (lambda t: t.update({UP: t[UP].float()}), r"up_proj\.B\.weight is stored as F32, not as F8_E4M3"),
        (lambda t: t.update({UP: t[UP].float().to(torch.float8_e5m2)}), r"stored as F8_E5M2, not as F8_E4M3"),
        (lambda t: t[UP].view(torch.uint8)[0].fill_(0x7F), r"up_proj\.B\.weight holds NaN or infinity"),
        (lambda t: t[UP].view(torch.uint8)[0].fill_(0x78), r"holds fp8 numbers above 240, which Trainium reads as"),
        (lambda t: t[f"{UP}_scale"][0].fill_(float("inf")), r"weight_scale holds NaN or infinity"),
    ],
    ids=["no scale", "floats", "e5m2", "NaN", "256", "infinite scale"],
)
def test_a_damaged_file_is_one_clear_line(damage: Any, message: str, tmp_path: Path) -> None:
    fp8_checkpoint(tmp_path)
    edit_tensors(tmp_path, damage)
    with pytest.raises(UserError, match=message) as caught:
        load_pretrained(tmp_path, torch.float32)
    assert "\n" not in str(caught.value)
