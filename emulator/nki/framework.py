"""How a host puts a kernel into its graph, and how the graph's interpreter runs it: ``neuronxcc.nki.FrameworkKernel``.

The host subclasses :class:`FrameworkKernel` to say what its own tensors are; ``dump_config(*inputs, *outputs)`` gives
the text that becomes the ``backend_config`` of a custom call. Here that text names the kernel, which stays in this
process, and :func:`execute` runs it on arrays. ``dump_config`` traces the kernel on shapes, so a broken rule of the
hardware is raised while the graph is built, at the kernel's line, as the SDK's compiler does.
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

from neuronmm.emulator.nki.dtypes import as_dtype, dtype_name
from neuronmm.emulator.nki.run import Kernel, TensorSpec, run
from neuronmm.emulator.nki.trace import Space, Trace

TARGET = "AwsNeuronCustomNativeKernel"
"""The custom call whose ``backend_config`` is what :meth:`FrameworkKernel.dump_config` gives."""


@dataclass(frozen=True)
class _Call:
    """A kernel on a launch grid for tensors of given shapes."""

    kernel: Kernel
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


_calls: dict[str, _Call] = {}


class FrameworkKernel:
    """A kernel as part of a host's graph; the host's subclass overrides the three methods that know its tensors."""

    def __init__(self, func_name: str, func: Callable[..., Any], grid: Sequence[int] = (), **options: Any) -> None:
        """``options`` concern the SDK's compiler and are ignored."""
        self.func_name = func_name
        self.kernel = Kernel(func.function if isinstance(func, Kernel) else func, tuple(grid) or (1,))

    def is_framework_tensor(self, value: Any) -> bool:
        """Whether ``value`` is a tensor of the host."""
        raise NotImplementedError

    def map_framework_tensor(self, value: Any) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype, as the host spells it, of a tensor of the host."""
        raise NotImplementedError

    def translate_to_neuron_dtype(self, dtype: Any) -> Any:
        """The host's dtype as one of ``nki.language`` or NumPy."""
        raise NotImplementedError

    def dump_config(self, *tensors: Any) -> tuple[str, list[str], list[str]]:
        """``(backend_config, names of the inputs, names of the outputs)`` for the inputs and then the outputs.

        Raises:
            NkiError: the kernel broke a rule of the hardware.
            TypeError: an argument is no tensor of the host, or the tensors the kernel writes are not its last ones.
        """
        specs = tuple(self._spec(t, i) for i, t in enumerate(tensors))
        names = list(inspect.signature(self.kernel.function).parameters)[: len(specs)]
        shapes = [[list(s.shape), s.dtype] for s in specs]
        text = json.dumps([_identity(self.kernel.function), self.kernel.grid, shapes])
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        if key not in _calls:
            count = self._outputs(specs)
            _calls[key] = _Call(self.kernel, specs[: len(specs) - count], specs[len(specs) - count :])
        call = _calls[key]
        config = {"kernel": self.func_name, "key": key, "grid": list(self.kernel.grid), "tensors": shapes}
        return json.dumps(config), names[: len(call.inputs)], names[len(call.inputs) :]

    def _spec(self, tensor: Any, number: int) -> TensorSpec:
        if not self.is_framework_tensor(tensor):
            raise TypeError(f"{self.func_name}: argument {number} is a {type(tensor).__name__}, not a tensor")
        shape, dtype = self.map_framework_tensor(tensor)
        return TensorSpec(tuple(int(n) for n in shape), dtype_name(as_dtype(self.translate_to_neuron_dtype(dtype))))

    def _outputs(self, specs: tuple[TensorSpec, ...]) -> int:
        """How many of the last tensors the kernel writes; traces it."""
        trace = run(self.kernel, *specs, fold=True).trace
        arguments = [b.id for b in trace.buffers if b.space is Space.HBM and b.kernel_argument]
        written = {region.buffer for step in trace.instructions for region in step.writes}
        wrote = [b in written for b in arguments]
        count = sum(wrote)
        if not count or not all(wrote[-count:]):
            raise TypeError(f"{self.func_name}: the tensors it writes must be its last arguments; it writes {wrote}")
        return count


def execute(config: str | bytes, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Run the kernel of a custom call on its operands; bfloat16 arrays are those of ml_dtypes.

    What the kernel leaves unwritten of an output is NaN.

    Raises:
        NkiError: the kernel broke a rule.
        KeyError: no kernel of this process has that config.
        ValueError: the operands are not those the config was made for.
    """
    call = _call(config)
    given = [TensorSpec(a.shape, dtype_name(a.dtype)) for a in inputs]
    if given != list(call.inputs):
        raise ValueError(f"kernel {call.kernel.__name__}: operands {given}, but it was built for {list(call.inputs)}")
    return run(call.kernel, *inputs, outputs=call.outputs).outputs


def kernel_of(config: str | bytes) -> Callable[..., Any]:
    """The kernel function that a custom call's config names; raises KeyError as :func:`execute` does."""
    return _call(config).kernel.function


def trace_of(config: str | bytes) -> Trace:
    """What the kernel that a custom call's config names does, from shapes alone; raises as :func:`execute` does."""
    call = _call(config)
    return run(call.kernel, *call.inputs, outputs=call.outputs, fold=True).trace


def _call(config: str | bytes) -> _Call:
    document = json.loads(config)
    call = _calls.get(document["key"])
    if call is None:
        raise KeyError(f"kernel {document['kernel']}: its graph was built in another process; build it in this one")
    return call


def _identity(value: Any) -> Any:
    """What tells one kernel from another, the same in every process as far as it can be: code and constants."""
    if isinstance(value, FunctionType):
        cells = [_identity(cell.cell_contents) for cell in value.__closure__ or ()]
        code = hashlib.sha256(value.__code__.co_code + repr(_constants(value.__code__)).encode()).hexdigest()
        return [value.__module__, value.__qualname__, code, cells, [_identity(d) for d in value.__defaults__ or ()]]
    if isinstance(value, Kernel):
        return [_identity(value.function), value.grid]
    if isinstance(value, ModuleType):
        return value.__name__
    text = repr(value)
    return f"{type(value).__name__} {text}" if " at 0x" not in text else f"{type(value).__name__} {id(value)}"


def _constants(code: Any) -> list[Any]:
    """A code object's constants and names, those of the functions within it included."""
    return [code.co_names, *(_constants(c) if hasattr(c, "co_code") else c for c in code.co_consts)]
