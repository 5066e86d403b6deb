"""What is below NxD Inference, without NxD: the names that it imports and no others, and kernels on torch tensors."""

from __future__ import annotations

import importlib

import pytest
import torch

from neuronmm.emulator.nki import NkiError
from neuronmm.emulator.runtime import neuron_emulation
from neuronmm.emulator.runtime.nxd import NotEmulatedError, surface

NAMES = ["torch_xla.core.xla_model", "torch_neuronx.xla_impl.ops", "nkilib.core.qkv.qkv", "libneuronxla"]


def test_the_packages_can_be_imported_inside_the_block_only() -> None:
    with neuron_emulation(runtime="nxd"):
        for module, names in surface().items():
            found = importlib.import_module(module)
            assert all(hasattr(found, name) for name in names)
    for name in NAMES:
        with pytest.raises(ImportError):
            importlib.import_module(name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch_xla.core.xla_model", "xla_device"),
        ("torch_neuronx.xla_impl.ops", "Gelu"),
        ("nkilib.core.qkv", "nothing"),
    ],
)
def test_any_other_name_is_an_error(module: str, name: str) -> None:
    with neuron_emulation(runtime="nxd"):
        assert not hasattr(importlib.import_module(module), name)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{module}.{name}")


def test_a_name_that_the_cpu_mode_does_not_use_refuses_to_be_used() -> None:
    with neuron_emulation(runtime="nxd"):
        ops = importlib.import_module("torch_neuronx.xla_impl.ops")
        kernel = importlib.import_module("nkilib.core.mlp.mlp").mlp
        spmd = torch.classes.neuron.SPMDModel
        for use in (ops.TopK, ops.RmsNorm.apply, kernel, spmd, ops.nki_jit()(max), ops.xla_hlo_call(max)):
            with pytest.raises(NotEmulatedError, match="is not emulated: NxD's CPU mode does not use it"):
                use(1)


def double(x):  # type: ignore[no-untyped-def]
    """A kernel of the second dialect: y = x + x, for at most 128 rows."""
    import nki.isa as nisa
    import nki.language as nl

    y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=total, data1=tile, data2=tile, op=nl.add)
    nisa.dma_copy(dst=y, src=total)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_run_on_tensors_and_are_counted(dtype: torch.dtype) -> None:
    x = torch.arange(12.0).reshape(3, 4).to(dtype)
    with neuron_emulation(runtime="nxd") as session:
        kernel = importlib.import_module("nki").jit(double)
        assert torch.equal(kernel[1](x), 2 * x) and torch.equal(kernel(x.T), 2 * x.T)
        assert session.calls == {"nki": 2}
        with pytest.raises(NkiError):
            kernel[1](torch.zeros(200, 4))
