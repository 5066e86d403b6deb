"""Run a kernel function on arrays (values, rules and trace) or on shapes alone (rules and trace)."""

from __future__ import annotations

import gc
import inspect
import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from neuronmm.emulator.nki import machine as machines
from neuronmm.emulator.nki.contract import FIRST, SECOND, check_outputs, check_values, protect_inputs
from neuronmm.emulator.nki.dtypes import as_dtype
from neuronmm.emulator.nki.machine import Machine
from neuronmm.emulator.nki.ranges import sequential_ranges
from neuronmm.emulator.nki.tile import Tile
from neuronmm.emulator.nki.trace import Space, Trace
from neuronmm.kernels.hardware import CORES, LOGICAL_CORE, TRN1, TRN2, NeuronCore


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype (a NumPy dtype or a name such as "bfloat16") of an HBM tensor."""

    shape: tuple[int, ...]
    dtype: Any = "float32"


@dataclass(frozen=True)
class Run:
    """The result of a run: the trace and, if the kernel ran on arrays, its outputs."""

    trace: Trace
    outputs: tuple[np.ndarray, ...] = ()


class Kernel:
    """A function decorated with ``@nki.jit``: inside a kernel a plain call, outside a simulation on arrays or tensors.

    ``grid`` is that of the launch, () without one. ``dialect`` is that of the decorator, "" for a plain function.
    Kernels of the second dialect have unrolled loops, and their arguments must be values of the language.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        grid: tuple[int, ...] = (),
        core: NeuronCore | None = None,
        dialect: str = "",
    ) -> None:
        self.function, self.grid, self.core, self.dialect = function, grid, core, dialect
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: Any) -> Kernel:
        grid = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
        return Kernel(self.function, grid, self.core, self.dialect)

    def __call__(self, *arguments: Any, **constants: Any) -> Any:
        if machines.running():
            if self.dialect == SECOND:
                check_values(self.__name__, [*arguments, *constants.values()])
            return self.function(*arguments, **constants)
        if any(isinstance(a, torch.Tensor) for a in (*arguments, *constants.values())):
            from neuronmm.emulator.nki.tensors import run_on_tensors  # it imports this module

            return run_on_tensors(self, *arguments, **constants)
        return simulate_kernel(self, *arguments, **constants)


def core_named(device: str) -> NeuronCore:
    """Return the core of a device by its name in the SDK.

    Raises:
        ValueError: the emulator has no such device.
    """
    known = {**CORES, "inf2": TRN1, "trn1n": TRN1}
    if device not in known:
        raise ValueError(f"unknown Neuron device {device!r}: the emulator has {', '.join(sorted(known))}")
    return known[device]


def jit(
    function: Callable[..., Any] | None = None, *, dialect: str = "", platform_target: str = "", **options: Any
) -> Any:
    """``@nki.jit`` of a dialect, with or without options.

    ``platform_target`` names the device; all other options, for the compiler, are ignored.

    Raises:
        ValueError: the emulator has no such device.
    """
    decorator = partial(Kernel, core=core_named(platform_target) if platform_target else None, dialect=dialect)
    return decorator if function is None else decorator(function)


def simulate_kernel(kernel: Callable[..., Any], *arguments: Any, **constants: Any) -> Any:
    """Run ``kernel`` on arrays and return its output array, or a tuple of several; raises as :func:`run`."""
    outputs = run(kernel, *arguments, **constants).outputs
    return outputs[0] if len(outputs) == 1 else outputs


def run(
    kernel: Callable[..., Any],
    *arguments: Any,
    outputs: Sequence[TensorSpec] = (),
    core: NeuronCore | None = None,
    shuffle: int | None = None,
    fold: bool = False,
    capacity: bool = True,
    **constants: Any,
) -> Run:
    """Run ``kernel`` under the emulator.

    Arrays and :class:`TensorSpec` among ``arguments`` and ``constants`` become HBM tensors; other values are passed
    unchanged. One TensorSpec makes the run shape-only. As with the SDK's ``simulate_kernel``, an array that the kernel
    writes changes.

    Args:
        outputs: unwritten tensors appended to the arguments, as hosts pass them. Without them the outputs are the
            tensors that the kernel returns.
        core: the NeuronCore. Default: that of the kernel's ``platform_target``, else Trainium 2's for the second
            dialect's ``nki.jit`` (which has no compiler for Trainium 1), else Trainium 1's.
        shuffle: seed of a random order of ``affine_range`` iterations.
        fold: record equal iterations of outermost loops once (shape-only runs).
        capacity: False lets live tiles exceed SBUF and PSUM, for schedules that a compiler would spill.

    Raises:
        NkiError: the kernel broke a rule.
        ValueError: ``fold`` in a run on arrays.
    """
    has_data = not any(isinstance(a, TensorSpec) for a in (*arguments, *constants.values()))
    target = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    core = core or target.core or (TRN2 if target.dialect == SECOND else TRN1)
    machine = Machine(target.__name__, core, has_data=has_data, shuffle=shuffle, fold=fold)
    if target.dialect == FIRST:
        machine.kernel_code = getattr(inspect.unwrap(target.function), "__code__", None)
    machine.grid = _grid(machine, target)
    result = None
    machines.push(machine)
    collecting = gc.isenabled()
    gc.disable()  # a long trace has many live objects and no garbage: collection would take most of the time
    try:
        tensors = [_tensor(machine, a, f"argument {i}") for i, a in enumerate(arguments)]
        named = {name: _tensor(machine, a, name) for name, a in constants.items()}
        if target.dialect == FIRST:
            protect_inputs(target.function, tensors, named)
        output_tensors = [_output(machine, spec, f"output {i}") for i, spec in enumerate(outputs)]
        if target.dialect == SECOND:
            check_values(target.__name__, [*arguments, *constants.values()])
        with nullcontext() if target.dialect == SECOND else sequential_ranges(target.function):
            for program in itertools.product(*(range(n) for n in machine.grid)):
                machine.program, machine.shared_count = program, 0
                result = target.function(*tensors, *output_tensors, **named)
        trace = machine.finish(capacity)
        results = output_tensors or _as_list(result)
        check_outputs(machine, target.function, target.dialect, results)
        if has_data:
            pairs = [*zip(tensors, arguments, strict=True), *((named[n], a) for n, a in constants.items())]
            _write_back(machine, pairs)
    finally:
        machines.pop()
        if collecting:
            gc.enable()
    return Run(trace, tuple(_array(t) for t in results) if has_data else ())


def _grid(machine: Machine, kernel: Kernel) -> tuple[int, ...]:
    """Return the launch grid; the second dialect launches on all physical cores of a logical one (NKI 0.7).

    The environment variable of the SDK says how many these are; without it any number is accepted.
    """
    cores = os.environ.get(LOGICAL_CORE) if kernel.dialect == SECOND else None
    if not kernel.grid:
        return (int(cores or 1),)
    if 0 in kernel.grid:
        machine.fail("launch grid", f"the launch grid {kernel.grid} of {kernel.__name__} has no programs", ">= 1", 0)
    if cores and [str(programs) for programs in kernel.grid] != [cores]:
        message = f"{kernel.__name__} must be launched on all physical cores of a logical one, {LOGICAL_CORE}"
        machine.fail("launch grid", message, f"({cores},)", kernel.grid)
    return kernel.grid


def _as_list(result: Any) -> list[Any]:
    """Return what a kernel returned (nothing, a tensor, or several) as a list."""
    if result is None:
        return []
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _tensor(machine: Machine, value: Any, name: str) -> Any:
    """Return an array or TensorSpec as an HBM tensor that has its values before the kernel; else ``value`` itself."""
    if isinstance(value, np.ndarray):
        tile = Tile.of(machine.allocate(value.shape, 0, value.dtype, Space.HBM, name, value))
    elif isinstance(value, TensorSpec):
        tile = _output(machine, value, name)
    else:
        return value
    tile.storage.preset = True
    return tile


def _output(machine: Machine, spec: TensorSpec, name: str) -> Tile:
    """Allocate an unwritten HBM argument of the kernel."""
    tile = Tile.of(machine.allocate(spec.shape, 0, as_dtype(spec.dtype), Space.HBM, name))
    tile.storage.record.kernel_argument = True
    return tile


def _write_back(machine: Machine, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Copy the tensors that the kernel wrote into the caller's arrays; ``pairs`` are (tensor, argument)."""
    written = {region.buffer for step in machine.trace.instructions for region in step.writes}
    for tile, array in pairs:
        if isinstance(array, np.ndarray) and tile.storage.record.id in written:
            array[...] = _array(tile)


def _array(tile: Tile) -> np.ndarray:
    assert tile.storage.data is not None
    return tile.storage.data.reshape(tile.storage.record.shape)
