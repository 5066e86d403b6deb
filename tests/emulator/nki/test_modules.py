"""``nki_modules`` makes the dialects importable inside, takes no real package's place and leaves nothing behind."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuronmm.emulator.nki import nki_modules

NAMES = ("neuronxcc", "nki")


def present() -> dict[str, object]:
    return {n: m for n, m in sys.modules.items() if n.split(".")[0] in NAMES}


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in present():
        del sys.modules[name]
    importlib.invalidate_caches()


def package(folder: Path, name: str, source: str, isa: str | None = None) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    if isa is not None:
        (folder / name / "isa.py").write_text(isa)


@pytest.mark.parametrize("name", ["neuronxcc.nki.language", "neuronxcc.nki.isa", "nki.language", "nki.isa"])
def test_importable_inside_only(name: str) -> None:
    before = present()
    with nki_modules():
        assert importlib.import_module(name).__name__ == name
    assert present() == before
    with pytest.raises(ImportError):
        importlib.import_module(name)


def test_leaves_no_trace_after_an_error() -> None:
    before = present()
    with pytest.raises(ZeroDivisionError), nki_modules():
        raise ZeroDivisionError
    assert present() == before


def test_a_stub_that_refuses_to_import_is_no_sdk(on_path: Path) -> None:
    package(on_path, "nki", "raise ImportError('install the SDK')")
    with nki_modules():
        assert hasattr(importlib.import_module("nki.isa"), "nc_matmul")
    with pytest.raises(ImportError, match="install the SDK"):
        importlib.import_module("nki")


def test_an_empty_package_is_no_sdk(on_path: Path) -> None:
    package(on_path, "nki", "", isa="")
    with nki_modules():
        assert hasattr(importlib.import_module("nki.isa"), "nc_matmul")
    assert not hasattr(importlib.import_module("nki.isa"), "nc_matmul")


def test_a_real_dialect_stays(on_path: Path) -> None:
    package(on_path, "nki", "", isa="def nc_matmul(): return 'real'")
    with nki_modules():
        assert importlib.import_module("nki.isa").nc_matmul() == "real"
        assert importlib.import_module("neuronxcc.nki.isa").nc_matmul is not None
    assert importlib.import_module("nki.isa").nc_matmul() == "real"


def test_a_kernel_call_outside_a_kernel_says_so() -> None:
    with nki_modules():
        language = importlib.import_module("nki.language")
    with pytest.raises(RuntimeError, match="inside a kernel"):
        language.ndarray((4, 4), dtype="float32")


def test_dialects_differ_where_the_sdk_does() -> None:
    with nki_modules():
        first, second = importlib.import_module("neuronxcc.nki.language"), importlib.import_module("nki.language")
    for removed in ("arange", "mgrid", "par_dim"):
        assert hasattr(first, removed) and not hasattr(second, removed)
