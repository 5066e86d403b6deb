"""Neuron's custom calls: a few operators of its own, and NKI kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from neuronmm.emulator.hlo.node import Function, Node, held, local, text
from neuronmm.emulator.hlo.types import InvalidGraphError
from neuronmm.emulator.nki.framework import TARGET, execute, kernel_of

_CALLS: dict[str, Callable[[Node], Function]] = {}
TRANSFER = "AwsNeuronTransferWithStaticRing"
"""Marks a tensor that stays in device memory: the operand itself."""


def _call(target: str) -> Callable[[Callable[[Node], Function]], Callable[[Node], Function]]:
    def register(make: Callable[[Node], Function]) -> Callable[[Node], Function]:
        _CALLS[target] = make
        return make

    return register


@local("custom-call", view=True)
def _custom_call(node: Node) -> Function:
    target, calls = node.proto.custom_call_target, node.settings.calls
    if target not in _CALLS:
        raise node.unsupported()
    function = _CALLS[target](node)
    if target in (TRANSFER, TARGET):
        return function

    def counted(*values: Any) -> Any:
        calls[target] += 1
        return function(*values)

    return counted


@_call(TRANSFER)
def _transfer(node: Node) -> Function:
    return lambda x: x


@_call("AwsNeuronRmsNorm")
def _rms_norm(node: Node) -> Function:
    """``x / sqrt(mean(x^2) + eps) * weight`` in float32 along the dimension that the config names."""
    dim, dtype, rank = int(node.proto.backend_config), node.dtype, len(node.sizes)
    along = [-1 if d == dim % rank else 1 for d in range(rank)]

    def rms_norm(x: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim, keepdim=True) + epsilon)
        return (wide * scale * weight.float().reshape(along)).to(dtype)

    return rms_norm


@_call("AwsNeuronSoftmax")
def _softmax(node: Node) -> Function:
    dim, dtype = int(node.proto.backend_config), node.dtype
    return lambda x: torch.softmax(x.float(), dim).to(dtype)


@_call("AwsNeuronGeluApprxTanh")
def _gelu(node: Node) -> Function:
    return lambda x: torch.nn.functional.gelu(x, approximate="tanh")


@_call("AwsNeuronArgMax")
def _argmax(node: Node) -> Function:
    dim, sizes = int(node.proto.backend_config), node.sizes
    return lambda x: x.argmax(dim).reshape(sizes)


@_call("AwsNeuronTopK")
def _topk(node: Node) -> Function:
    """The largest k along the last dimension and where they are."""
    k = int(node.proto.backend_config)

    def topk(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
        return values[..., :k], indices[..., :k]

    return topk


@_call(TARGET)
def _native_kernel(node: Node) -> Function:
    """An NKI kernel, interpreted; or, where the settings say so, the function's ``reference`` on the same tensors."""
    config, settings = node.proto.backend_config, node.settings
    several = bool(node.proto.shape.tuple_shapes)
    shapes = list(node.proto.shape.tuple_shapes) if several else [node.proto.shape]
    wanted = [(tuple(s.dimensions), held(s.element_type)) for s in shapes]

    def native_kernel(*tensors: Tensor) -> Any:
        if settings.kernels == "reference":
            function = kernel_of(config)
            reference = getattr(function, "reference", None)
            if reference is None:
                raise node.unsupported(f"kernel {function.__name__} has no attribute 'reference'")
            settings.calls["reference"] += 1
            made = reference(*tensors)
            made = made if isinstance(made, tuple) else (made,)
        else:
            settings.calls["nki"] += 1
            made = tuple(_from_numpy(a) for a in execute(config, [_to_numpy(t) for t in tensors]))
        if [(tuple(t.shape), t.dtype) for t in made] != wanted:
            given = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in made)
            raise InvalidGraphError(f"kernel {kernel_of(config).__name__} made {given}, not {text(node.proto.shape)}")
        return made if several else made[0]

    return native_kernel


def _to_numpy(tensor: Tensor) -> np.ndarray:
    """The same memory where it is contiguous; bfloat16 as ml_dtypes has it."""
    tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _from_numpy(array: np.ndarray) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
