"""Neuron's custom calls: the SDK's own operators, and NKI kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from neuronmm.emulator.hlo.node import Function, Node, from_storage, local, storage_dtype, to_storage
from neuronmm.emulator.hlo.types import InvalidGraphError, Type
from neuronmm.emulator.nki.arrays import from_numpy, to_numpy
from neuronmm.emulator.nki.framework import TARGET, execute, kernel_of

_TARGETS: dict[str, Callable[[Node], Function]] = {}
"""Custom-call target -> implementation."""
TRANSFER = "AwsNeuronTransferWithStaticRing"
"""Marks a tensor that stays in device memory; the result is the operand."""


def _target(name: str) -> Callable[[Callable[[Node], Function]], Callable[[Node], Function]]:
    def register(factory: Callable[[Node], Function]) -> Callable[[Node], Function]:
        _TARGETS[name] = factory
        return factory

    return register


@local("custom-call", view=True)
def _custom_call(node: Node) -> Function:
    target, calls = node.proto.custom_call_target, node.settings.calls
    if target not in _TARGETS:
        raise node.unsupported()
    function = _TARGETS[target](node)
    if target in (TRANSFER, TARGET):
        return function

    def counted(*values: Any) -> Any:
        calls[target] += 1
        return function(*values)

    return counted


@_target(TRANSFER)
def _transfer(node: Node) -> Function:
    return lambda x: x


@_target("AwsNeuronRmsNorm")
def _rms_norm(node: Node) -> Function:
    """Compute ``x / sqrt(mean(x^2) + epsilon) * weight`` in float32, along the dimension that the config names."""
    dim, dtype, dims = int(node.proto.backend_config), node.dtype, len(node.sizes)
    along = [-1 if d == dim % dims else 1 for d in range(dims)]

    def rms_norm(x: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(dim, keepdim=True) + epsilon)
        return (x32 * scale * weight.float().reshape(along)).to(dtype)

    return rms_norm


@_target("AwsNeuronSoftmax")
def _softmax(node: Node) -> Function:
    dim, dtype = int(node.proto.backend_config), node.dtype
    return lambda x: torch.softmax(x.float(), dim).to(dtype)


@_target("AwsNeuronGeluApprxTanh")
def _gelu(node: Node) -> Function:
    return lambda x: torch.nn.functional.gelu(x, approximate="tanh")


@_target("AwsNeuronArgMax")
def _argmax(node: Node) -> Function:
    dim, sizes, dtype = int(node.proto.backend_config), node.sizes, node.dtype
    return lambda x: x.argmax(dim).reshape(sizes).to(dtype)


@_target("AwsNeuronTopK")
def _topk(node: Node) -> Function:
    """Return the k largest values along the last dimension, and their indices."""
    k, dtype = int(node.proto.backend_config), storage_dtype(node.proto.shape.tuple_shapes[1].element_type)

    def topk(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
        return values[..., :k], indices[..., :k].to(dtype)

    return topk


@_target(TARGET)
def _native_kernel(node: Node) -> Function:
    """Interpret an NKI kernel, or run the function's ``reference`` on the same tensors if the settings ask for it."""
    config, settings = node.proto.backend_config, node.settings
    is_tuple = bool(node.proto.shape.tuple_shapes)
    shapes = list(node.proto.shape.tuple_shapes) if is_tuple else [node.proto.shape]
    expected = [(tuple(s.dimensions), storage_dtype(s.element_type)) for s in shapes]
    given = [shape.element_type for shape in node.operands]

    def interpreted(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the kernel on arrays of the declared types; a result of another type stays as it is."""
        arrays = [to_numpy(from_storage(t, element)) for t, element in zip(tensors, given, strict=True)]
        results = [from_numpy(array) for array in execute(config, arrays)]
        stored = [to_storage(t, shape.element_type) for t, shape in zip(results, shapes, strict=True)]
        return tuple(t if s is None else s for t, s in zip(results, stored, strict=True))

    def native_kernel(*tensors: Tensor) -> Any:
        if settings.kernels == "reference":
            function = kernel_of(config)
            reference = getattr(function, "reference", None)
            if reference is None:
                raise node.unsupported(f"kernel {function.__name__} has no attribute 'reference'")
            settings.calls["reference"] += 1
            results = reference(*tensors)
            results = results if isinstance(results, tuple) else (results,)
        else:
            settings.calls["nki"] += 1
            results = interpreted(tensors)
        if [(tuple(t.shape), t.dtype) for t in results] != expected:
            actual = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in results)
            declared = Type.of(node.proto.shape)
            raise InvalidGraphError(f"kernel {kernel_of(config).__name__} returned {actual}, not {declared}")
        return results if is_tuple else results[0]

    return native_kernel
