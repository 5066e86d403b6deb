"""Finds the Neuron host on this machine, and checks that it is real and that its versions are supported.

The public package index has empty packages under the SDK's names. Some raise when imported, some do not. So a host
counts as present only if it has a file that the empty package lacks, and the compiler only if it has the name that the
kernels need.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from neuronmm.kernels.hardware import TRN1
from neuronmm.models.errors import UserError

Runtime = Literal["hlo", "nxd"]
"""What a host needs below it: the graph builder and runtime of its HLO, or torch-xla and NKI under PyTorch."""


@dataclass(frozen=True)
class Host:
    """A library that owns the model's loop on Trainium.

    ``package``, ``proof``: its top-level package, and a file in it that only the real one has. ``adapter``: the module
    of the plugin for it. ``layouts``: of the hidden state that it offers, the default first. ``nki``: a module and the
    name in it that the kernels need. ``compilers``: supported neuronx-cc, from the first to before the second.
    ``sdk``: the releases with these. ``requires``: what to install, for errors. ``emulated``: how to get it without
    the SDK.
    """

    name: str
    package: str
    proof: str
    adapter: str
    runtime: Runtime
    layouts: tuple[str, ...]
    nki: tuple[str, str]
    compilers: tuple[tuple[int, int], tuple[int, int]]
    sdk: str
    requires: str
    emulated: str

    @property
    def present(self) -> bool:
        """Whether the real package is installed or on the Python path. Nothing is imported."""
        try:
            spec = find_spec(self.package)
        except ValueError:  # a stand-in without a spec
            return False
        return any((Path(place) / self.proof).is_file() for place in (spec and spec.submodule_search_locations) or ())


_INDEX = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
_HLO: dict[str, Any] = {
    "runtime": "hlo",
    "layouts": ("HSB", "BSH"),
    "nki": ("neuronxcc.nki", "FrameworkKernel"),
    "compilers": ((2, 16), (2, 22)),  # 2.16 has nki_call first; 2.22 (SDK 2.27) has no transformers-neuronx
    "sdk": "2.21 to 2.26",
    "requires": f"pip install transformers-neuronx neuronx-cc==2.* torch-neuronx {_INDEX}",
    "emulated": "pip install --no-deps optimum-neuron==0.2.0 optimum==1.23.3 protobuf, beside transformers 4.51",
}
HOSTS = {
    host.name: host
    for host in (
        Host(
            name="transformers-neuronx",
            package="transformers_neuronx",
            proof="llama/model.py",
            adapter="neuronmm.models.neuronx.host_tnx",
            **_HLO,
        ),
        Host(
            name="optimum-neuron",
            package="optimum",
            proof="neuron/models/inference/hlo/backend/decoder.py",
            adapter="neuronmm.models.neuronx.host_optimum",
            **_HLO,
        ),
        Host(
            name="nxd-inference",
            package="neuronx_distributed_inference",
            proof="models/application_base.py",
            adapter="neuronmm.models.neuronx.host_nxd",
            runtime="nxd",
            layouts=("BSH",),
            nki=("nki", "jit"),
            compilers=((2, 24), (2, 27)),  # those of SDK 2.29, the first with NxD Inference 0.9, to 2.31, the last
            sdk="2.29 to 2.31",
            requires=f"pip install neuronx-distributed-inference==0.9.* neuronx-cc==2.24.* torch-neuronx {_INDEX}",
            emulated=(
                "put the sources of neuronx-distributed and neuronx-distributed-inference 0.9 on PYTHONPATH, beside "
                "transformers 4.57 (docs/trainium.md)"
            ),
        ),
    )
}
"""Name -> host; the first one that is present is used."""

EMULATED = "emulated"
"""Part of the compiler's version under the emulation."""


def choose(name: str | None = None) -> Host:
    """Return the host ``name``, or the first one that is present.

    Raises:
        UserError: there is no such host, or it is not present.
    """
    if name is not None and name not in HOSTS:
        raise UserError(f"unknown Neuron host {name!r}; there are: {', '.join(HOSTS)}")
    asked = [HOSTS[name]] if name else list(HOSTS.values())
    found = next((host for host in asked if host.present), None)
    if found is None:
        what = f"the Neuron host {name} is not present" if name else f"no Neuron host is present ({', '.join(HOSTS)})"
        raise UserError(f"{what}; {_install(asked)}; to emulate the SDK below it: {_ways(asked)}")
    return found


def missing(name: str | None = None) -> str | None:
    """Return None if a host and the SDK can be imported, otherwise what is missing and how to install it."""
    asked = [HOSTS[name]] if name in HOSTS else list(HOSTS.values())
    if compiler_version() is None:
        return f"the Neuron SDK is not present; {_install(asked)}"
    try:
        choose(name)
    except UserError as error:
        return str(error)
    return None


def adapter(host: Host) -> Any:
    """Import the plugin of a host.

    Raises:
        UserError: the SDK is missing, or too old or too new for the host.
    """
    compiler = compiler_version()
    if compiler is None:
        raise UserError(f"the Neuron SDK is not present; {_install([host])}")
    check_compiler(compiler, host)
    if not _offers(*host.nki):
        raise UserError(f"the SDK here has no {'.'.join(host.nki)}, which {host.name} needs; {_install([host])}")
    return import_module(host.adapter)


def compiler_version() -> str | None:
    """Return neuronx-cc's version, or None if there is no compiler that a host can use, real or emulated."""
    if not _offers("neuronxcc", "__version__") or not any(_offers(*host.nki) for host in HOSTS.values()):
        return None
    return str(import_module("neuronxcc").__version__)


def check_compiler(compiler: str, host: Host) -> None:
    """Raise if neuronx-cc of this version does not support the host and the kernels' dialect of NKI."""
    if EMULATED in compiler:
        return
    numbers = tuple(int(part) for part in compiler.split("+")[0].split(".")[:2])
    first, end = host.compilers
    if not first <= numbers < end:
        age = "old" if numbers < first else "new"
        supported = f"{first[0]}.{first[1]} to {end[0]}.{end[1] - 1}"
        raise UserError(
            f"neuronx-cc {compiler} is too {age} for {host.name} and its NKI dialect; install {supported} "
            f"(Neuron SDK {host.sdk})"
        )


def versions() -> dict[str, str]:
    """Return the versions that determine a compiled graph, by distribution."""
    installed = {}
    names = ("neuronmm", "neuronx-cc", "libneuronxla", "torch-neuronx", "transformers-neuronx", "optimum-neuron", "nki")
    for name in (*names, "neuronx-distributed", "neuronx-distributed-inference"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**installed, "compiler": str(compiler_version())}


def check_cores(tp_degree: int) -> None:
    """Raise if this machine has fewer than ``tp_degree`` NeuronCores."""
    chips = len(list(Path("/dev").glob("neuron[0-9]*")))
    cores = chips * TRN1.cores_per_chip
    if tp_degree > cores:
        has = f"this machine has {cores} NeuronCores in {chips} devices (/dev/neuron*)"
        raise UserError(f"tp_degree {tp_degree}: {has}")


def _offers(module: str, attribute: str) -> bool:
    """Return whether a module can be imported and has this attribute."""
    try:
        return hasattr(import_module(module), attribute)
    except (ImportError, AttributeError, RuntimeError):
        return False


def _install(hosts: list[Host]) -> str:
    """Return how to get the first of these hosts on a device."""
    host = hosts[0]
    return (
        f"install the Neuron SDK ({host.sdk}) and {host.name} on a Trainium or Inferentia2 instance "
        f"(docs/trainium.md): {host.requires}"
    )


def _ways(hosts: list[Host]) -> str:
    return ", or ".join(dict.fromkeys(host.emulated for host in hosts))
