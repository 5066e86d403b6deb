"""XLA itself, on the CPU, as the oracle of what a module means; needs jax."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch


class InvalidError(ValueError):
    """XLA refuses a module."""


def reads(data: bytes) -> str:
    """The module of a serialised HloModuleProto as XLA prints it."""
    pytest.importorskip("jax")
    hlo = pytest.importorskip("jaxlib._hlo")
    return str(hlo.HloModule.from_serialized_hlo_module_proto(data).to_string())


def runs(module: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of an HloModuleProto on one device."""
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
    """Check a module as XLA does when it takes one: its HLO reader, then the verifier of what it becomes, StableHLO.

    Raises:
        InvalidError: XLA refuses it; with XLA's words.
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
        raise InvalidError(str(error)) from None
