"""What this machine has, which backend and kernels neuronmm would choose on it, and what to do about what is missing.

Every check stands alone and imports what it needs, because a package that is broken is one of the answers.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from neuronmm.version import VERSION

FEATURES = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "amx_bf16")
"""The instruction sets that the C++ core can use, as Linux names them."""


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis. ``advice`` is what to do; None if nothing has to be done."""

    what: str
    found: str
    advice: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and whether generation works: on which backend and kernels, or why not."""

    findings: list[Finding]
    backend: str | None
    kernels: str | None
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {"kind": "found", "what": "diagnosis", "works": self.problem is None, **asdict(self)}


def diagnose() -> Diagnosis:
    """Check this machine and generate a few tokens with a tiny random model."""
    checks = (_packages, _processor, _compiler, _core, _gpu, _neuron, _cache)
    findings = [finding for check in checks for finding in _attempt(check)]
    try:
        backend, kernels = import_module("neuronmm.measure.trial").try_generation()
    except Exception as error:
        return Diagnosis(findings, None, None, _one_line(error))
    return Diagnosis(findings, backend, kernels, None)


def _attempt(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Return the findings of a check; if it fails, the failure is its finding."""
    name = check.__name__.strip("_")
    try:
        return list(check())
    except Exception as error:
        return [Finding(name, f"the check failed ({_one_line(error)})", "install the packages above that are missing")]


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _packages() -> Iterator[Finding]:
    """Compare the installed packages with the requirements of neuronmm."""
    yield Finding("neuronmm", f"{VERSION} on Python {platform.python_version()}, {platform.platform()}")
    fine = []
    for text in requires("neuronmm") or ():
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        advice = f"pip install '{requirement.name}{requirement.specifier}'"
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            yield Finding(requirement.name, "missing", advice)
            continue
        if requirement.specifier.contains(installed, prereleases=True):
            fine.append(f"{requirement.name} {installed}")
        else:
            yield Finding(requirement.name, f"{installed}, but neuronmm needs {requirement.specifier}", advice)
    yield Finding("packages", ", ".join(fine))


def _processor() -> Iterator[Finding]:
    from torch import device

    from neuronmm.measure.machine import describe_machine

    machine = describe_machine(device("cpu"))
    yield Finding("processor", f"{machine.device}, {machine.cores} usable cores")
    yield Finding("memory", f"{machine.memory_bytes / 2**30:.1f} GiB")
    info = Path("/proc/cpuinfo")
    flags = set(re.findall(r"\w+", info.read_text())) if info.is_file() else set()
    present = [feature for feature in FEATURES if feature in flags]
    yield Finding(
        "instruction sets", ", ".join(present) or f"none of those that the core has code for ({platform.machine()})"
    )


def _compiler() -> Iterator[Finding]:
    """Find the C++ compiler that an installation would use."""
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    path = shutil.which(command[0])
    if path is None:
        advice = "only needed to build the C++ core: install one, such as Debian's package g++, or set CXX"
        yield Finding("C++ compiler", f"no {command[0]}", advice)
        return
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=20)
    yield Finding("C++ compiler", f"{path}: {(done.stdout or done.stderr).strip().partition(chr(10))[0]}")


def _core() -> Iterator[Finding]:
    from neuronmm.kernels.cpu import library

    core = library.core()
    if core is None:
        built = [file.name for file in Path(library.__file__).parent.glob("_core*.so")]
        found = f"{built[0]} is stale or cannot be loaded" if built else "not built"
        advice = "decoding runs on torch, several times slower; " + library.NOT_BUILT.partition("; ")[2]
        yield Finding("C++ core", found, advice)
        return
    yield Finding("C++ core", f"built; it uses the instruction set {library.isa()}")
    threaded = bool(core.neuronmm_threaded())
    alone = None if threaded else "the core runs on one thread; install a compiler with OpenMP and reinstall neuronmm"
    import torch

    yield Finding("OpenMP", f"{torch.get_num_threads()} threads" if threaded else "not in the core", alone)


def _gpu() -> Iterator[Finding]:
    import torch

    from neuronmm.engine.backends.torch_runner import missing_cuda

    reason = missing_cuda()
    if reason is None:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding("GPU", ", ".join(names))
        return
    advice = None
    if shutil.which("nvidia-smi"):
        advice = "the driver is there: install a CUDA build of torch (https://pytorch.org/get-started/locally)"
    yield Finding("GPU", reason.partition(";")[0], advice)


def _neuron() -> Iterator[Finding]:
    from neuronmm.models.neuronx import sdk

    reason = sdk.missing()
    if reason is None:
        yield Finding("Neuron SDK", ", ".join(f"{name} {value}" for name, value in sdk.versions().items()))
    devices = list(Path("/dev").glob("neuron[0-9]*"))
    if reason is not None:
        found, _, advice = reason.partition("; ")
        yield Finding("Neuron SDK", found, advice if devices else None)
    yield Finding("Neuron devices", str(len(devices)))


def _cache() -> Iterator[Finding]:
    from neuronmm.kernels.cache import cache_folder

    folder = cache_folder()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(existing).free / 1e9
    writable = os.access(existing, os.W_OK | os.X_OK)
    advice = (
        None if writable else "GGUF files cannot be unpacked there: set NEURONMM_CACHE to a folder that can be written"
    )
    yield Finding("cache folder", f"{folder}, {free:.1f} GB free" + ("" if writable else ", not writable"), advice)
