"""The ctypes structs match those of the built core; a core built from other sources is rejected."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from neuronmm.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.core() is None, reason="the C++ core is not built")


@pytest.fixture
def fresh() -> Iterator[None]:
    """Load the core again in the test, and once more after it."""
    library.core.cache_clear()
    yield
    library.core.cache_clear()


@pytest.mark.parametrize("name", ["Matrix", "Linear", "Layer", "Model"])
def test_a_core_with_other_structs_is_rejected(name: str, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(getattr(library, name)):  # type: ignore[misc]
        _fields_ = (("more", ctypes.c_void_p),)

    monkeypatch.setattr(library, name, Longer)
    assert library.core() is None


def test_a_core_with_fewer_types_is_rejected(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "INT4", library.INT4 + 1)
    assert library.core() is None


def test_a_core_that_does_not_report_its_struct_sizes_is_rejected() -> None:
    assert not library._matches(ctypes.CDLL(None))


def test_a_core_built_from_other_sources_is_rejected(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.core() is not None
    library.core.cache_clear()
    monkeypatch.setattr(library, "_digest_of_sources", lambda: "0" * 64)
    assert library.core() is None


def test_a_core_for_another_python_is_passed_over(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = next(Path(library.__file__).parent.glob(f"_core{EXTENSION_SUFFIXES[0]}"))
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    (tmp_path / "_core.cpython-39-x86_64-linux-gnu.so").write_bytes(built.read_bytes())
    assert library.core() is None
