"""Run a kernel function: on arrays (numerics and rules) or on shapes alone (rules and trace)."""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from neuronmm.emulator.nki import contract
from neuronmm.emulator.nki import machine as machines
from neuronmm.emulator.nki.dtypes import as_dtype
from neuronmm.emulator.nki.machine import Machine
from neuronmm.emulator.nki.ranges import sequential_ranges
from neuronmm.emulator.nki.tile import Tile
from neuronmm.emulator.nki.trace import Space, Trace
from neuronmm.emulator.nki.values import check_values
from neuronmm.kernels.hardware import CORES, TRN1, TRN2, NeuronCore


@dataclass(frozen=True)
class TensorSpec:
    """An HBM tensor by shape and dtype (a NumPy dtype or a name such as "bfloat16")."""

    shape: tuple[int, ...]
    dtype: Any = "float32"


@dataclass(frozen=True)
class Run:
    """What a kernel left: its trace and, if it ran on arrays, the tensors it returned or was given to fill."""

    trace: Trace
    outputs: tuple[np.ndarray, ...] = ()


class Kernel:
    """What ``@nki.jit`` makes of a function: inside a kernel a plain call, outside a simulation on arrays.

    ``dialect`` is that of the decorator, "" where a host took the plain function. Loops of the second dialect are
    unrolled, and the arguments of its kernels are values of the language.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        grid: tuple[int, ...] = (1,),
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
            if self.dialect == contract.SECOND:
                check_values(self.__name__, [*arguments, *constants.values()])
            return self.function(*arguments, **constants)
        return simulate_kernel(self, *arguments, **constants)


def jit(
    function: Callable[..., Any] | None = None, *, dialect: str = "", platform_target: str = "", **options: Any
) -> Any:
    """``@nki.jit`` of a dialect, with or without options.

    ``platform_target`` names the device; all other options concern the compiler and are ignored.
    """
    make = partial(Kernel, core=CORES.get(platform_target), dialect=dialect)
    return make if function is None else make(function)


def simulate_kernel(kernel: Callable[..., Any], *arguments: Any, **constants: Any) -> Any:
    """Run ``kernel`` on arrays; return its output array, or a tuple of them."""
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

    Arguments that are arrays or :class:`TensorSpec` become HBM tensors, all others are passed as they are; any spec
    among them makes a shape-only run. ``outputs`` are unwritten tensors appended to the arguments, as hosts pass
    them; without them the tensors the kernel returns are the outputs. An array that the kernel writes into changes, as
    with the SDK's ``simulate_kernel``. ``shuffle`` seeds a random order of
    ``affine_range`` iterations. ``fold`` records like iterations of outermost loops once (shape-only). ``capacity``
    False lets live tiles exceed SBUF and PSUM, for schedules that a compiler would spill. ``core`` is the NeuronCore;
    without it that of the kernel's ``platform_target``, else Trainium 2's for a kernel that the second dialect's
    ``nki.jit`` made (there is no such compiler for Trainium 1), else Trainium 1's.

    Raises:
        NkiError: the kernel broke a rule.
    """
    data = not any(isinstance(a, TensorSpec) for a in (*arguments, *constants.values()))
    own = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    core = core or own.core or (TRN2 if own.dialect == contract.SECOND else TRN1)
    machine = Machine(own.__name__, core, data=data, shuffle=shuffle, fold=fold)
    machine.grid = own.grid
    if own.dialect == contract.FIRST:
        machine.body = getattr(inspect.unwrap(own.function), "__code__", None)
    if 0 in own.grid:
        machine.fail("launch grid", f"the launch grid {own.grid} of {own.__name__} has no programs", ">= 1", 0)
    result = None
    machines.push(machine)
    collecting = gc.isenabled()
    gc.disable()  # a long trace is many live objects and no garbage: collecting would take most of the time
    try:
        tensors = [_tensor(machine, a, f"argument {i}") for i, a in enumerate(arguments)]
        named = {name: _tensor(machine, a, name) for name, a in constants.items()}
        if own.dialect == contract.FIRST:
            contract.protect(own.function, tensors, named)
        made = [_output(machine, spec, f"output {i}") for i, spec in enumerate(outputs)]
        if own.dialect == contract.SECOND:
            check_values(own.__name__, [*arguments, *constants.values()])
        with nullcontext() if own.dialect == contract.SECOND else sequential_ranges(own.function):
            for program in itertools.product(*(range(n) for n in machine.grid)):
                machine.program, machine.declared = program, 0
                result = own.function(*tensors, *made, **named)
        trace = machine.finish(capacity)
        returned = made or ([] if result is None else list(result) if isinstance(result, (tuple, list)) else [result])
        contract.check_outputs(machine, own.function, own.dialect, returned)
        if data:
            _write_back(
                machine, [*zip(tensors, arguments, strict=True), *((named[n], a) for n, a in constants.items())]
            )
    finally:
        machines.pop()
        if collecting:
            gc.enable()
    return Run(trace, tuple(_array(t) for t in returned) if data else ())


def _tensor(machine: Machine, value: Any, name: str) -> Any:
    if isinstance(value, np.ndarray):
        tile = Tile.of(machine.allocate(value.shape, 0, value.dtype, Space.HBM, name, value))
    elif isinstance(value, TensorSpec):
        tile = _output(machine, value, name)
    else:
        return value
    tile.storage.filled = True
    return tile


def _output(machine: Machine, spec: TensorSpec, name: str) -> Tile:
    tile = Tile.of(machine.allocate(spec.shape, 0, as_dtype(spec.dtype), Space.HBM, name))
    tile.storage.record.kernel_argument = True
    return tile


def _write_back(machine: Machine, given: Sequence[tuple[Any, Any]]) -> None:
    """Write into the caller's arrays what the kernel wrote into the arguments made of them."""
    written = {region.buffer for step in machine.trace.instructions for region in step.writes}
    for tile, array in given:
        if isinstance(array, np.ndarray) and tile.storage.record.id in written:
            array[...] = _array(tile)


def _array(tile: Tile) -> np.ndarray:
    assert tile.storage.data is not None
    return tile.storage.data.reshape(tile.storage.record.shape)
