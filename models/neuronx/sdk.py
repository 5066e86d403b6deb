"""Finds the Neuron host on this machine, and checks that it is real and that its versions are supported.

The public package index has empty packages under the SDK's names. Some raise when imported, some do not, so a package
counts as real only if it has a name that the empty one lacks.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from neuronmm.kernels.hardware import TRN1
from neuronmm.models.errors import UserError

INSTALL = (
    "install the Neuron SDK 2.26 and transformers-neuronx on a Trainium or Inferentia2 instance (docs/trainium.md): "
    "pip install transformers-neuronx neuronx-cc==2.* torch-neuronx "
    "--extra-index-url https://pip.repos.neuron.amazonaws.com"
)
EMULATE = (
    "to emulate the SDK below a host, install the host beside transformers 4.51: "
    "pip install --no-deps optimum-neuron==0.2.0 optimum==1.23.3 protobuf"
)
HOSTS = {
    "transformers-neuronx": ("transformers_neuronx", "LlamaForSampling", "neuronmm.models.neuronx.host_tnx"),
    "optimum-neuron": (
        "optimum.neuron.models.inference.hlo.backend.decoder",
        "NeuronHloDecoderModel",
        "neuronmm.models.neuronx.host_optimum",
    ),
}
"""Distribution -> one of its modules, a name that only the real module has, and the adapter.

The first installed host is used.
"""

EMULATED = "emulated"
"""Part of the compiler's version under the emulation."""

COMPILERS = ((2, 16), (2, 22))
"""Supported neuronx-cc: from 2.16, which has nki_call, to before 2.22 (SDK 2.27), which has no transformers-neuronx."""


def compiler_version() -> str | None:
    """Return neuronx-cc's version, or None if there is no compiler, real or emulated."""
    try:
        compiler = import_module("neuronxcc")
        import_module("neuronxcc.nki").FrameworkKernel  # noqa: B018
        return str(compiler.__version__)
    except (ImportError, AttributeError, RuntimeError):
        return None


def missing() -> str | None:
    """Return None if a host and the SDK can be imported, otherwise what is missing and how to install it."""
    if compiler_version() is None:
        return f"the Neuron SDK is not present; {INSTALL}"
    if _present() is None:
        advice = EMULATE if EMULATED in str(compiler_version()) else INSTALL
        return f"neither transformers-neuronx 0.13 nor optimum-neuron 0.2.0 is present; {advice}"
    return None


def host() -> Any:
    """Import the adapter of the installed host.

    Raises:
        UserError: no host is installed, or the SDK is too old or too new for it.
    """
    reason = missing()
    if reason is not None:
        raise UserError(reason)
    check_compiler(str(compiler_version()))
    return import_module(HOSTS[str(_present())][2])


def check_compiler(compiler: str) -> None:
    """Raise if neuronx-cc of this version does not support the hosts and the kernels' dialect, ``neuronxcc.nki``."""
    if EMULATED in compiler:
        return
    numbers = tuple(int(part) for part in compiler.split("+")[0].split(".")[:2])
    first, end = COMPILERS
    if not first <= numbers < end:
        age = "old" if numbers < first else "new"
        raise UserError(
            f"neuronx-cc {compiler} is too {age} for the Neuron hosts and their NKI dialect; install 2.16 to 2.21"
        )


def versions() -> dict[str, str]:
    """Return the versions that determine a compiled graph, by distribution."""
    installed = {}
    for name in ("neuronmm", "neuronx-cc", "libneuronxla", "torch-neuronx", "transformers-neuronx", "optimum-neuron"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**installed, "compiler": str(compiler_version())}


def _present() -> str | None:
    """Return the first host that is installed and real."""
    for name, (module, proof, _) in HOSTS.items():
        try:
            if hasattr(import_module(module), proof):
                return name
        except (ImportError, AttributeError, RuntimeError):
            continue
    return None


def check_cores(tp_degree: int) -> None:
    """Raise if this machine has fewer than ``tp_degree`` NeuronCores."""
    chips = len(list(Path("/dev").glob("neuron[0-9]*")))
    cores = chips * TRN1.cores_per_chip
    if tp_degree > cores:
        has = f"this machine has {cores} NeuronCores in {chips} devices (/dev/neuron*)"
        raise UserError(f"tp_degree {tp_degree}: {has}")
