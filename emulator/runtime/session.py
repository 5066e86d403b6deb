"""``with neuron_emulation():`` makes an emulated Neuron runtime importable for a host, and removes it again."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch

from neuronmm.emulator.hlo import Settings
from neuronmm.emulator.importable import importable, offers, remove
from neuronmm.emulator.nki import nki_modules
from neuronmm.emulator.nki.tensors import counters
from neuronmm.emulator.pyhlo import HloScribe, HloShape
from neuronmm.emulator.pyhlo.literal import serialize_torch
from neuronmm.emulator.pyhlo.messages import HLO, METANEFF, XLA_DATA
from neuronmm.emulator.runtime import compiler, models, nxd, tensors

Session = Settings
"""How NKI kernels run, and the counts of custom calls."""

HOSTS = ("transformers_neuronx", "optimum.neuron", "neuronx_distributed", "neuronx_distributed_inference")
"""Host packages. They keep references to the runtime that they were imported with, so each runtime has its own."""

_OPS = {
    "_init_neuron": lambda: None,
    "_to_neuron": tensors.to_core,
    "_from_neuron": tensors.from_core,
    "_slice_neuron": tensors.slice_device,
    "_parallel_to_neuron": tensors.to_device,
    "_parallel_from_neuron": tensors.from_device,
    "_parallel_write_neuron": tensors.write,
    "_parallel_slice_neuron": tensors.slice_device,
    "_parallel_run_neuron": models.run,
    "_parallel_executor_run": models.execute,
}
_CLASSES = {
    "ParallelModel": models.ParallelModel,
    "ParallelTensorSet": models.ParallelTensorSet,
    "ParallelExecutor": models.ParallelExecutor,
}
_VERSION = "2.8.0.2.10.0+emulated"
_TORCH_NEURONX: dict[str, dict[str, Any]] = {
    "torch_neuronx": {"__version__": _VERSION, "DataParallel": object},
    "torch_neuronx.pyhlo": {},
    "torch_neuronx.pyhlo.scribe": {"HloScribe": HloScribe, "HloShape": HloShape},
    "torch_neuronx.pyhlo.xla_data_pb2": XLA_DATA,
    "torch_neuronx.pyhlo.hlo_pb2": HLO,
    "torch_neuronx.pyhlo.constant": {},
    "torch_neuronx.pyhlo.constant.serialize_torch": {"serialize_torch": serialize_torch},
    "torch_neuronx.proto": {},
    "torch_neuronx.proto.metaneff_pb2": METANEFF,
}
_LIBNEURONXLA: dict[str, dict[str, Any]] = {
    "libneuronxla": {"__version__": "2.2.12677.0+emulated", "neuron_xla_compile": compiler.neuron_xla_compile},
    "libneuronxla.neuron_cc_cache": {
        "CacheUrl": compiler.CacheUrl,
        "CompileCache": compiler.CompileCache,
        "CompileCacheFs": compiler.CompileCacheFs,
        "CompileCacheS3": compiler.CompileCacheS3,
        "create_compile_cache": compiler.create_compile_cache,
    },
}

_BELOW_NXD = {
    "torch_xla": ("torch_xla.core.xla_model", "REDUCE_SUM"),
    "torch_neuronx": ("torch_neuronx.xla_impl.trace", "generate_neff"),
    "libneuronxla": ("libneuronxla", "neuron_xla_compile"),
    "nkilib": ("nkilib.core.qkv.qkv", "qkv"),
}
"""Package -> a module of it and a name that only the real one has."""

_running: list[tuple[Session, str]] = []
"""The sessions of the blocks that run, each with its runtime."""
_emulated_hosts: dict[str, ModuleType] = {}
"""Host modules that were imported inside a block, by name; they return to ``sys.modules`` in the next block."""


@contextmanager
def neuron_emulation(
    kernels: Literal["nki", "reference"] = "nki", runtime: Literal["hlo", "nxd"] = "hlo"
) -> Iterator[Session]:
    """Emulate the Neuron runtime on this machine's CPU inside the block.

    The parts of ``torch_neuronx``, ``libneuronxla`` and ``neuronxcc`` that hosts use can be imported; a package that is
    really installed is left alone. The command ``neuronx-cc``, which hosts run if ``NEURONX_DUMP_TO`` is set, is on the
    PATH. The block restores ``sys.modules``, ``torch.ops``, ``torch.classes``, the PATH and the variables ``NEURON*``
    and ``NXD*``. Host modules that were imported inside are removed and return, the same objects, in the next block. A
    nested block uses the outer session, whatever its ``kernels``.

    Args:
        kernels: ``nki`` interprets NKI kernels; ``reference`` runs the kernel function's attribute ``reference``.
        runtime: what the host needs below it: ``hlo`` for transformers-neuronx and optimum-neuron, ``nxd`` for NxD
            Inference (:mod:`.nxd`), which interprets all kernels.

    Raises:
        RuntimeError: the block is nested in one with another runtime.

    Yields:
        The session; its ``calls`` counts custom calls by target, and NKI kernels as ``nki`` or ``reference``.
    """
    if _running:
        session, outer = _running[-1]
        if runtime != outer:
            raise RuntimeError(f"neuron_emulation(runtime={runtime!r}) inside of one of {outer!r}: leave that first")
        yield session
        return
    session = Session(kernels)
    with ExitStack() as stack:
        stack.enter_context(_environment())
        stack.enter_context(_hosts())
        if runtime == "nxd":
            _enter_nxd(stack)
        else:
            _enter_hlo(stack)
        models.ParallelModel.settings = session
        counters.append(session.calls)
        stack.callback(counters.pop)
        _running.append((session, runtime))
        stack.callback(_running.pop)
        yield session


def _enter_hlo(stack: ExitStack) -> None:
    """Make the runtime below HLO's graph builders importable, as far as it is not installed."""
    stack.enter_context(nki_modules())
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="neuron-emulation-"))
    if not offers("libneuronxla.neuron_cc_cache", "CacheUrl"):
        stack.enter_context(importable(_LIBNEURONXLA))
        compiler.install_command(Path(folder))
    if not offers("torch_neuronx.pyhlo.scribe", "HloScribe"):
        stack.enter_context(importable(_TORCH_NEURONX))
        stack.enter_context(_namespace(torch.ops, "neuron", _OPS))
        stack.enter_context(_namespace(torch.classes, "neuron", _CLASSES))
    compiler.session_cache.append(folder)
    stack.callback(compiler.session_cache.pop)


def _enter_nxd(stack: ExitStack) -> None:
    """Make the packages below NxD Inference importable, as far as they are not installed."""
    modules = nxd.surface()
    stack.enter_context(nki_modules(modules))
    for package, (module, proof) in _BELOW_NXD.items():
        if not offers(module, proof):
            own = {name: names for name, names in modules.items() if name.split(".")[0] == package}
            stack.enter_context(importable(own))
    stack.enter_context(_namespace(torch.classes, "neuron", nxd.classes()))


@contextmanager
def _environment() -> Iterator[None]:
    def variables() -> dict[str, str]:
        return {
            name: value for name, value in os.environ.items() if name.startswith(("NEURON", "NXD")) or name == "PATH"
        }

    before = variables()
    try:
        yield
    finally:
        for name in variables():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _hosts() -> Iterator[None]:
    """Hide host modules that were imported outside, and restore those of earlier blocks; afterwards the reverse."""
    outside = remove(HOSTS)
    _restore(_emulated_hosts)
    try:
        yield
    finally:
        _emulated_hosts.update(remove(HOSTS))
        _restore(outside)


def _restore(modules: dict[str, ModuleType]) -> None:
    sys.modules.update(modules)
    for name in HOSTS:
        parent, _, child = name.rpartition(".")
        if name in modules and parent in sys.modules:
            setattr(sys.modules[parent], child, modules[name])


@contextmanager
def _namespace(owner: Any, name: str, members: dict[str, Any]) -> Iterator[None]:
    before = owner.__dict__.get(name)
    setattr(owner, name, SimpleNamespace(**members))
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)
