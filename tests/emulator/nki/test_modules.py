"""``nki_modules`` makes the dialects importable inside the block, hides no real package and cleans up."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuronmm.emulator.nki import nki_modules

PACKAGES = ("neuronxcc", "nki")


def imported_modules() -> dict[str, object]:
    return {n: m for n, m in sys.modules.items() if n.split(".")[0] in PACKAGES}


@pytest.fixture
def folder_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in imported_modules():
        del sys.modules[name]
    importlib.invalidate_caches()


def write_package(folder: Path, name: str, source: str, isa: str | None = None) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    if isa is not None:
        (folder / name / "isa.py").write_text(isa)


@pytest.mark.parametrize("name", ["neuronxcc.nki.language", "neuronxcc.nki.isa", "nki.language", "nki.isa"])
def test_dialects_are_importable_only_inside(name: str) -> None:
    before = imported_modules()
    with nki_modules():
        assert importlib.import_module(name).__name__ == name
    assert imported_modules() == before
    with pytest.raises(ImportError):
        importlib.import_module(name)


def test_an_error_inside_leaves_nothing_imported() -> None:
    before = imported_modules()
    with pytest.raises(ZeroDivisionError), nki_modules():
        raise ZeroDivisionError
    assert imported_modules() == before


def test_a_package_that_refuses_to_import_is_replaced(folder_on_path: Path) -> None:
    write_package(folder_on_path, "nki", "raise ImportError('install the SDK')")
    with nki_modules():
        assert hasattr(importlib.import_module("nki.isa"), "nc_matmul")
    with pytest.raises(ImportError, match="install the SDK"):
        importlib.import_module("nki")


def test_an_empty_package_is_replaced(folder_on_path: Path) -> None:
    write_package(folder_on_path, "nki", "", isa="")
    with nki_modules():
        assert hasattr(importlib.import_module("nki.isa"), "nc_matmul")
    assert not hasattr(importlib.import_module("nki.isa"), "nc_matmul")


def test_a_real_package_is_not_replaced(folder_on_path: Path) -> None:
    write_package(folder_on_path, "nki", "", isa="def nc_matmul(): return 'real'")
    with nki_modules():
        assert importlib.import_module("nki.isa").nc_matmul() == "real"
        assert importlib.import_module("neuronxcc.nki.isa").nc_matmul is not None
    assert importlib.import_module("nki.isa").nc_matmul() == "real"


def test_a_call_outside_a_kernel_raises() -> None:
    with nki_modules():
        language = importlib.import_module("nki.language")
    with pytest.raises(RuntimeError, match="inside a kernel"):
        language.ndarray((4, 4), dtype="float32")


def test_the_second_dialect_lacks_the_removed_names() -> None:
    with nki_modules():
        first, second = importlib.import_module("neuronxcc.nki.language"), importlib.import_module("nki.language")
    for removed in ("arange", "mgrid", "par_dim"):
        assert hasattr(first, removed) and not hasattr(second, removed)
