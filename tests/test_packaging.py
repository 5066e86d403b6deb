"""The wheel and the source distribution contain all files they need and no others, and the installed package works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

import house_rules
from neuronmm.kernels.cpu import library

ROOT = Path(__file__).parent.parent
DEVICE_SDK = {
    "neuronx_distributed",
    "neuronx_distributed_inference",
    "neuronxcc",
    "nki",
    "optimum",
    "transformers_neuronx",
    "vllm",
}
"""Packages of machines with a Neuron device, and vLLM. Modules that need them are not imported here."""
PACKAGES = set(house_rules.packages(ROOT)) - {"neuronmm"}


def tracked(*suffixes: str) -> frozenset[str]:
    """Return the files of the source tree that git tracks, relative to its root."""
    return frozenset(name for name in _listed() if name.endswith(suffixes))


@cache
def _listed() -> tuple[str, ...]:
    """List the tracked files once, since the tree may change during the tests."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    if listed.returncode or not names:
        pytest.skip("not a git checkout: nothing to compare the distributions with")
    return tuple(names)


def installed_names(suffixes: tuple[str, ...]) -> set[str]:
    """Return the paths of the tracked files in an installation."""
    names = {PurePosixPath(name) for name in tracked(*suffixes)}
    inside = {str(p) for p in names if p.parts[0] == "neuronmm"}
    return inside | {f"neuronmm/{p}" for p in names if p.parts[0] in PACKAGES}


@pytest.fixture(scope="module")
def dists(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return (sdist, wheel): the sdist built from a copy of the tracked files, and the wheel built from the sdist."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked(""):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_module_recipe_and_the_type_marker(dists: tuple[Path, Path]) -> None:
    names = wheel_names(dists[1])
    expected = installed_names((".py", ".yaml", ".jinja"))
    assert {
        "neuronmm/py.typed",
        "neuronmm/measure/page.html.jinja",
        "neuronmm/models/patch.py",
        "neuronmm/kernels/ops.py",
    } <= expected | {"neuronmm/py.typed"}
    assert expected | {"neuronmm/py.typed", "neuronmm/compression/prose.txt"} <= names


def test_the_wheel_puts_only_neuronmm_at_the_top(dists: tuple[Path, Path]) -> None:
    tops = {name.split("/")[0] for name in wheel_names(dists[1])}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"neuronmm"}
    assert not any("test" in PurePosixPath(name).name for name in wheel_names(dists[1]))


def test_the_wheel_carries_the_licence(dists: tuple[Path, Path]) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names(dists[1]))


def test_the_sdist_holds_all_sources(dists: tuple[Path, Path]) -> None:
    with tarfile.open(dists[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    suffixes = (".py", ".yaml", ".jinja", ".cpp", ".h", ".md", ".sh", ".toml", "prose.txt")
    missing = tracked(*suffixes, "LICENSE", "Makefile", "py.typed") - names
    assert not missing


def test_the_installed_package_works_without_the_source_tree(dists: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(dists[1]) as archive:
        archive.extractall(target)
    code = """
import importlib.util, pathlib, pkgutil, sys
import neuronmm
root = pathlib.Path(neuronmm.__file__).parent
assert root == pathlib.Path(sys.argv[1]) / "neuronmm", root
for name in sys.argv[3].split():
    package = importlib.import_module(f'neuronmm.{name}')
    assert root in pathlib.Path(package.__file__).parents, package
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if importlib.util.find_spec(module.name).origin.endswith(".py"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name.split(".")[0] not in sys.argv[2].split():
                    raise
built = list(root.glob("kernels/cpu/_core*"))
assert bool(built) == (neuronmm.kernels.cpu.core() is not None), built
for verb in neuronmm.__all__:
    assert getattr(neuronmm, verb) is not None
from neuronmm.cli import main
assert main(["--version"]) == 0
"""
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(target), " ".join(DEVICE_SDK), " ".join(["commands", *PACKAGES])],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()[0].isdigit()


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler here")
def test_a_machine_with_a_compiler_has_the_core_and_its_instruction_sets() -> None:
    """Without the core its tests are skipped, and an installation in which it does not compile goes on."""
    assert library.core() is not None
    processor = Path("/proc/cpuinfo")
    flags = processor.read_text().split() if processor.exists() else []
    needed = {"portable": True, "avx2": {"avx2", "fma", "f16c"} <= set(flags)}
    try:
        assert [name for name, there in needed.items() if there and not library.set_isa(name)] == []
    finally:
        library.set_isa(None)
