"""Which Neuron host is on this machine, whether it is a real one, and whether its versions fit.

The public package index carries empty packages under the SDK's names. Some raise when imported, some import without an
error: a name that only the real one has is what proves it.
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
    "a host to emulate the SDK below is missing; install one beside transformers 4.51: "
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
"""Distribution -> a module of it and a name that only the real one has there, and the adapter. The first that is there
is used."""

EMULATED = "emulated"
"""Part of the version of a compiler that the emulation stands in for."""

COMPILERS = ((2, 16), (2, 22))
"""neuronx-cc from, and before: nki_call came with 2.16; from 2.22 (SDK 2.27) there is no transformers-neuronx."""


def compiler_version() -> str | None:
    """neuronx-cc's version where the compiler, real or emulated, is here."""
    try:
        found = import_module("neuronxcc")
        import_module("neuronxcc.nki").FrameworkKernel  # noqa: B018
        return str(found.__version__)
    except (ImportError, AttributeError, RuntimeError):
        return None


def missing() -> str | None:
    """None where a host and the SDK below it can be imported, else what is missing and the way out."""
    if compiler_version() is None:
        return f"the Neuron SDK is not present; {INSTALL}"
    if _present() is None:
        way = EMULATE if EMULATED in str(compiler_version()) else INSTALL
        return f"neither transformers-neuronx 0.13 nor optimum-neuron 0.2.0 is present; {way}"
    return None


def host() -> Any:
    """The adapter of the host that is here.

    Raises:
        UserError: there is none, or the SDK below it is too old or too new for it.
    """
    reason = missing()
    if reason is not None:
        raise UserError(reason)
    check_compiler(str(compiler_version()))
    return import_module(HOSTS[str(_present())][2])


def check_compiler(found: str) -> None:
    """Raise if a neuronx-cc of version ``found`` does not speak the kernels' dialect, ``neuronxcc.nki``, to a host."""
    if EMULATED in found:
        return
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    oldest, newest = COMPILERS
    if not oldest <= numbers < newest:
        age, span = ("old" if numbers < oldest else "new"), "2.16 to 2.21"
        raise UserError(f"neuronx-cc {found} is too {age} for the Neuron hosts and their NKI dialect; install {span}")


def versions() -> dict[str, str]:
    """The versions that decide what a compiled graph is, by distribution."""
    found = {}
    for name in ("neuronmm", "neuronx-cc", "libneuronxla", "torch-neuronx", "transformers-neuronx", "optimum-neuron"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**found, "compiler": str(compiler_version())}


def _present() -> str | None:
    """The first host that is here and real."""
    for name, (module, proof, _) in HOSTS.items():
        try:
            if hasattr(import_module(module), proof):
                return name
        except (ImportError, AttributeError, RuntimeError):
            continue
    return None


def check_cores(wanted: int) -> None:
    """Raise if this machine has fewer NeuronCores than are wanted."""
    chips = len(list(Path("/dev").glob("neuron[0-9]*")))
    cores = chips * TRN1.cores_per_chip
    if wanted > cores:
        raise UserError(f"tp_degree {wanted}: this machine has {cores} NeuronCores in {chips} devices (/dev/neuron*)")
