"""Kernels in a host's graph: ``neuronxcc.nki.FrameworkKernel`` and the execution of its custom calls.

A host subclasses :class:`FrameworkKernel` to describe its own tensors; ``dump_config(*inputs, *outputs)`` returns the
text that becomes the ``backend_config`` of a custom call. Here the text names the kernel, which stays in this process,
and :func:`execute` runs it on arrays. ``dump_config`` traces the kernel on shapes, so a broken rule raises NkiError at
the kernel's line while the graph is built, as with the SDK's compiler.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from neuronmm.emulator.nki.arrays import to_numpy
from neuronmm.emulator.nki.dtypes import as_dtype, dtype_name
from neuronmm.emulator.nki.run import Kernel, TensorSpec, run
from neuronmm.emulator.nki.trace import Space, Trace

TARGET = "AwsNeuronCustomNativeKernel"
"""Target of the custom call whose ``backend_config`` comes from :meth:`FrameworkKernel.dump_config`."""


@dataclass(frozen=True)
class _Call:
    """A kernel with its launch grid, and the shapes and dtypes of its tensors."""

    kernel: Kernel
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


_calls: dict[str, _Call] = {}


class FrameworkKernel:
    """A kernel in a host's graph; the host's subclass implements the three methods that describe its tensors."""

    def __init__(self, func_name: str, func: Callable[..., Any], grid: Sequence[int] = (), **options: Any) -> None:
        """Wrap ``func`` on the launch ``grid``; ``options``, for the SDK's compiler, are ignored."""
        self.func_name = func_name
        self.kernel = Kernel(func.function if isinstance(func, Kernel) else func, tuple(grid) or (1,))

    def is_framework_tensor(self, value: Any) -> bool:
        """Return whether ``value`` is a tensor of the host."""
        raise NotImplementedError

    def map_framework_tensor(self, value: Any) -> tuple[tuple[int, ...], Any]:
        """Return the shape of a tensor of the host, and its dtype as the host names it."""
        raise NotImplementedError

    def translate_to_neuron_dtype(self, dtype: Any) -> Any:
        """Return a dtype of the host as one of ``nki.language`` or NumPy."""
        raise NotImplementedError

    def dump_config(self, *tensors: Any) -> tuple[str, list[str], list[str]]:
        """Return ``(backend_config, input names, output names)`` for ``tensors``: the inputs, then the outputs.

        Raises:
            NkiError: the kernel broke a rule.
            TypeError: an argument is not a tensor of the host, or the kernel writes arguments other than its last ones.
        """
        specs = tuple(self._spec(t, i) for i, t in enumerate(tensors))
        names = list(inspect.signature(self.kernel.function).parameters)[: len(specs)]
        shapes = [[list(s.shape), s.dtype] for s in specs]
        text = json.dumps([_identity(self.kernel.function), self.kernel.grid, shapes])
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        if key not in _calls:
            inputs = len(specs) - self._output_count(specs)
            _calls[key] = _Call(self.kernel, specs[:inputs], specs[inputs:])
        call = _calls[key]
        config = {"kernel": self.func_name, "key": key, "grid": list(self.kernel.grid), "tensors": shapes}
        return json.dumps(config), names[: len(call.inputs)], names[len(call.inputs) :]

    def _spec(self, tensor: Any, number: int) -> TensorSpec:
        if not self.is_framework_tensor(tensor):
            raise TypeError(f"{self.func_name}: argument {number} is a {type(tensor).__name__}, not a tensor")
        shape, dtype = self.map_framework_tensor(tensor)
        return TensorSpec(tuple(int(n) for n in shape), dtype_name(as_dtype(self.translate_to_neuron_dtype(dtype))))

    def _output_count(self, specs: tuple[TensorSpec, ...]) -> int:
        """Trace the kernel and return the number of tensors it writes, which must be its last arguments."""
        trace = run(self.kernel, *specs, fold=True).trace
        arguments = [b.id for b in trace.buffers if b.space is Space.HBM and b.kernel_argument]
        written_buffers = {region.buffer for step in trace.instructions for region in step.writes}
        written = [b in written_buffers for b in arguments]
        count = sum(written)
        if not count or not all(written[-count:]):
            raise TypeError(
                f"{self.func_name}: the tensors it writes must be its last arguments; arguments written: {written}"
            )
        return count


def execute(config: str | bytes, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Run the kernel of a custom call on its operands; bfloat16 arrays have the dtype of ml_dtypes.

    Elements of an output that the kernel does not write are NaN.

    Raises:
        NkiError: the kernel broke a rule.
        KeyError: the config is from another process.
        ValueError: the operands differ in shape or dtype from those of the config.
    """
    call = _call(config)
    specs = [TensorSpec(a.shape, dtype_name(a.dtype)) for a in inputs]
    if specs != list(call.inputs):
        raise ValueError(f"kernel {call.kernel.__name__}: operands {specs}, but it was built for {list(call.inputs)}")
    return run(call.kernel, *inputs, outputs=call.outputs).outputs


def kernel_of(config: str | bytes) -> Callable[..., Any]:
    """Return the kernel function of a custom call; raises KeyError as :func:`execute` does."""
    return _call(config).kernel.function


def trace_of(config: str | bytes) -> Trace:
    """Return the trace of a custom call's kernel from shapes alone; raises KeyError, NkiError as :func:`execute`."""
    call = _call(config)
    return run(call.kernel, *call.inputs, outputs=call.outputs, fold=True).trace


def _call(config: str | bytes) -> _Call:
    document = json.loads(config)
    call = _calls.get(document["key"])
    if call is None:
        raise KeyError(f"kernel {document['kernel']}: its graph was built in another process; build it in this one")
    return call


def _identity(value: Any) -> Any:
    """Return what distinguishes one kernel from another: code and constants, equal across processes where possible."""
    if isinstance(value, FunctionType):
        cells = [_identity(cell.cell_contents) for cell in value.__closure__ or ()]
        code = hashlib.sha256(value.__code__.co_code + repr(_constants(value.__code__)).encode()).hexdigest()
        named = [[name, _identity(default)] for name, default in sorted((value.__kwdefaults__ or {}).items())]
        defaults = [_identity(default) for default in value.__defaults__ or ()]
        return [value.__module__, value.__qualname__, code, cells, defaults, named]
    if isinstance(value, Kernel):
        return [_identity(value.function), value.grid]
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_identity, value)]
    if isinstance(value, torch.Tensor):
        return ["Tensor", _identity(to_numpy(value.detach()))]
    if isinstance(value, np.ndarray):  # its text leaves elements out
        content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return [str(value.dtype), list(value.shape), content]
    text = repr(value)
    return f"{type(value).__name__} {text}" if " at 0x" not in text else f"{type(value).__name__} {id(value)}"


def _constants(code: Any) -> list[Any]:
    """Return the names and constants of a code object and of the functions in it."""
    return [code.co_names, *(_constants(c) if hasattr(c, "co_code") else c for c in code.co_consts)]
