"""Kernels of ``nki`` on tensors of torch, as PyTorch hosts call them: ``nki.jit(kernel)[cores](tensors)``.

Source: nki.jit's API page (SDK 2.31): the arguments decide the framework, and the variable
NEURON_PLATFORM_TARGET_OVERRIDE names the device.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch

from neuronmm.emulator.nki.arrays import from_numpy, to_numpy
from neuronmm.emulator.nki.run import Kernel, core_named, run
from neuronmm.kernels.hardware import TRN2, NeuronCore

TARGET = "NEURON_PLATFORM_TARGET_OVERRIDE"

counters: list[Counter[str]] = []
"""The counters of the running emulation sessions; the last one counts each kernel that runs on tensors as ``nki``."""


def target_core() -> NeuronCore:
    """Return the core of the device that the environment names; Trainium 2's if it names none.

    Raises:
        ValueError: the environment names a device that the emulator does not have.
    """
    return core_named(os.environ.get(TARGET, TRN2.device))


def run_on_tensors(kernel: Kernel, *arguments: Any, **constants: Any) -> Any:
    """Interpret a kernel and return its output, a tensor, or a tuple of several.

    Raises:
        NkiError: the kernel broke a rule.
    """
    if counters:
        counters[-1]["nki"] += 1
    values = list(map(_array, arguments))
    named: dict[str, Any] = {name: _array(value) for name, value in constants.items()}
    outputs = run(kernel, *values, core=target_core(), **named).outputs
    for given, array in zip((*arguments, *constants.values()), (*values, *named.values()), strict=True):
        if isinstance(given, torch.Tensor) and not given.is_contiguous():  # the kernel had a copy, and may write it
            content = from_numpy(array)
            if not torch.equal(content, given):
                given.detach().copy_(content)
    tensors = tuple(from_numpy(array) for array in outputs)
    return tensors[0] if len(tensors) == 1 else tensors


def _array(value: Any) -> Any:
    return to_numpy(value.detach()) if isinstance(value, torch.Tensor) else value
