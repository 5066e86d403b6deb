"""A clone can be imported from its root, installed or not, and its folders do not shadow other packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import house_rules as house

ROOT = Path(__file__).parent.parent
FOLDERS = sorted(set(house.packages(ROOT)) - {"neuronmm"})

IMPORTS = """
from transformers import LlamaConfig
import neuronmm, pathlib, sys
home = pathlib.Path(neuronmm.__file__).parent
for module in (m for name, m in list(sys.modules.items()) if name.startswith("neuronmm.")):
    assert pathlib.Path(module.__file__).is_relative_to(sys.argv[1]), module
assert home == pathlib.Path(sys.argv[1]) / "neuronmm", home
print(neuronmm.__version__, neuronmm.compress.__module__)
"""


def python(code: str, *arguments: str, path: list[Path], cwd: Path, site: bool = False) -> str:
    """Return the output of ``python -c`` in ``cwd`` with ``path`` as PYTHONPATH; ``site``: with installed packages."""
    command = [sys.executable, *([] if site else ["-S"]), "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with links to all installed packages except neuronmm."""
    folder = tmp_path_factory.mktemp("others")
    for name in ("purelib", "platlib"):
        for package in Path(sysconfig.get_path(name)).iterdir():
            if "neuronmm" not in package.name and not (folder / package.name).exists():
                (folder / package.name).symlink_to(package)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the package as a regular install lays it out, without the C++ core."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


def test_with_no_install(others: Path, tmp_path: Path) -> None:
    assert "compression.pipeline" in python(IMPORTS, str(ROOT), path=[others], cwd=ROOT)
    assert "compression.pipeline" in python(IMPORTS, str(ROOT), path=[others, ROOT], cwd=tmp_path)


def test_with_a_regular_install(others: Path, installed: Path, tmp_path: Path) -> None:
    assert "compression.pipeline" in python(IMPORTS, str(ROOT), path=[others, installed], cwd=ROOT)
    assert "compression.pipeline" in python(IMPORTS, str(installed), path=[others, installed], cwd=tmp_path)


def test_with_a_second_checkout(others: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels").symlink_to(ROOT / "kernels")
    (tmp_path / "neuronmm_checkout.py").write_bytes((ROOT / "neuronmm_checkout.py").read_bytes())
    assert "compression.pipeline" in python(IMPORTS, str(ROOT), path=[ROOT, others], cwd=tmp_path)


def test_with_an_editable_install(tmp_path: Path) -> None:
    """The install that the tests run in."""
    for cwd in (ROOT, tmp_path):
        assert "compression.pipeline" in python(IMPORTS, str(ROOT), path=[], cwd=cwd, site=True)


@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_a_type_checker_reads_the_folders(checker: str, tmp_path: Path) -> None:
    """A module that a checker cannot resolve has no types, and a wrong call of its functions goes unnoticed."""
    pytest.importorskip(checker)
    lines = ("from neuronmm.engine.engine import load", "load(backend='cpu')", "load('model', backend='cpu')")
    (tmp_path / "calls.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", checker, str(tmp_path / "calls.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert re.findall(r"calls\.py:(\d+).* error: .*\"model\"", done.stdout) == ["2"], done.stdout[-2000:]


@pytest.mark.parametrize("folder", FOLDERS)
def test_another_package_of_the_name_is_found(folder: str, tmp_path: Path) -> None:
    """Such as ``kernels`` of the hub, or ``compression`` of the standard library of Python 3.14."""
    (tmp_path / folder / "_common").mkdir(parents=True)
    (tmp_path / folder / "__init__.py").write_text(f"from {folder}._common import streams\n__version__ = '7'\n")
    (tmp_path / folder / "_common" / "__init__.py").write_text("streams = 'theirs'\n")
    code = f"from {folder} import streams; import {folder}; print(streams, {folder}.__version__)"
    assert python(code, path=[tmp_path], cwd=ROOT) == "theirs 7\n"


@pytest.mark.parametrize("folder", FOLDERS)
def test_without_one_the_folder_is_empty(folder: str) -> None:
    code = f"import {folder}, pkgutil; print({folder}.__version__, [*pkgutil.iter_modules({folder}.__path__)])"
    assert python(code, path=[], cwd=ROOT) == "0 []\n"
