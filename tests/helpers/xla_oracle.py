"""XLA on the CPU as the oracle for HLO modules; tests that call it are skipped where jax is not installed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch


class RefusedError(ValueError):
    """XLA refuses a module."""


def print_module(data: bytes) -> str:
    """Parse a serialised HloModuleProto with XLA and return XLA's text of it."""
    pytest.importorskip("jax")
    hlo = pytest.importorskip("jaxlib._hlo")
    return str(hlo.HloModule.from_serialized_hlo_module_proto(data).to_string())


def run(module: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compile an HloModuleProto with XLA, run it on one CPU device, and return its outputs."""
    jax = pytest.importorskip("jax")
    from jaxlib import _jax

    device = jax.devices("cpu")[0]
    stablehlo = _jax.mlir.hlo_to_stablehlo(module.SerializeToString())
    devices = _jax.DeviceList((device,))
    program = device.client.compile_and_load(stablehlo, devices, _jax.CompileOptions())
    with jax.enable_x64(True):
        arrays = [jax.device_put(_array(t), device) for t in inputs]
    outputs = program.execute_sharded(arrays).disassemble_into_single_device_arrays()
    return [_tensor(np.asarray(parts[0])) for parts in outputs]


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def verify(module: Any) -> None:
    """Read an HloModuleProto with XLA's HLO reader, convert it to StableHLO, and run StableHLO's verifier.

    Raises:
        RefusedError: XLA refuses the module; the message is XLA's.
    """
    hlo, jax = pytest.importorskip("jaxlib._hlo"), pytest.importorskip("jax")
    from jax._src.interpreters import mlir
    from jaxlib import _jax
    from jaxlib.mlir import ir

    data = module.SerializeToString()
    try:
        hlo.HloModule.from_serialized_hlo_module_proto(data)
        stablehlo = _jax.mlir.hlo_to_stablehlo(data)
        with mlir.make_ir_context():
            ir.Module.parse(stablehlo)
    except (ir.MLIRError, jax.errors.JaxRuntimeError) as error:
        raise RefusedError(str(error)) from None
