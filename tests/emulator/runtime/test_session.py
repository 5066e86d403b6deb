"""The runtime can be imported inside the block only, hides no real package, and leaves no trace."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from neuronmm.emulator.runtime import neuron_emulation, session

ROOTS = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "transformers_neuronx")


def process_state() -> tuple[object, ...]:
    """Return everything in this process that a block changes and must restore."""
    modules = {n: m for n, m in sys.modules.items() if n.split(".")[0] in ROOTS or n.startswith("optimum.neuron")}
    variables = {n: v for n, v in os.environ.items() if n.startswith("NEURON") or n == "PATH"}
    return modules, variables, vars(torch.ops).get("neuron"), vars(torch.classes).get("neuron")


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] in ROOTS]:
        del sys.modules[name]
    importlib.invalidate_caches()


NAMES = [
    "torch_neuronx",
    "torch_neuronx.pyhlo.scribe",
    "torch_neuronx.pyhlo.xla_data_pb2",
    "torch_neuronx.proto.metaneff_pb2",
    "libneuronxla.neuron_cc_cache",
    "neuronxcc.nki.language",
]


def test_the_runtime_can_be_imported_inside_the_block_only() -> None:
    before = process_state()
    with neuron_emulation():
        for name in NAMES:
            assert importlib.import_module(name).__name__ == name
            assert importlib.util.find_spec(name) is not None
        assert importlib.import_module("neuronxcc").__version__.endswith("+emulated")
        assert torch.ops.neuron._init_neuron() is None and torch.classes.neuron.ParallelModel is not None
        os.environ["NEURON_RT_NUM_CORES"] = "2"
    assert process_state() == before
    for name in NAMES:
        with pytest.raises(ImportError):
            importlib.import_module(name)


def test_the_process_is_restored_after_an_error() -> None:
    before = process_state()
    with pytest.raises(ZeroDivisionError), neuron_emulation():
        raise ZeroDivisionError
    assert process_state() == before


def test_a_nested_block_uses_the_outer_session() -> None:
    with neuron_emulation("reference") as outer:
        with neuron_emulation() as inner:
            assert inner is outer and inner.kernels == "reference"
        assert importlib.import_module("torch_neuronx") is not None
    with neuron_emulation() as fresh:
        assert fresh is not outer and not fresh.calls


def test_a_nested_block_cannot_change_the_runtime() -> None:
    before = process_state()
    with neuron_emulation():
        with (
            pytest.raises(RuntimeError, match="runtime='nxd'\\) inside of one of 'hlo'"),
            neuron_emulation(runtime="nxd"),
        ):
            pass
        assert importlib.import_module("torch_neuronx.pyhlo.scribe") is not None
    assert process_state() == before


def test_a_host_is_removed_with_the_session_and_returns_in_the_next(
    on_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_emulated_hosts", {})
    (on_path / "transformers_neuronx").mkdir()
    (on_path / "transformers_neuronx" / "__init__.py").write_text("from torch_neuronx.pyhlo.scribe import HloScribe")
    with neuron_emulation():
        host = importlib.import_module("transformers_neuronx")
    assert "transformers_neuronx" not in sys.modules
    with pytest.raises(ImportError):
        importlib.import_module("transformers_neuronx")
    with neuron_emulation():
        assert importlib.import_module("transformers_neuronx") is host


def test_stubs_are_replaced_and_a_real_package_is_left_alone(on_path: Path) -> None:
    (on_path / "torch_neuronx").mkdir()
    (on_path / "torch_neuronx" / "__init__.py").write_text("raise ImportError('install the SDK')")
    (on_path / "libneuronxla").mkdir()
    (on_path / "libneuronxla" / "__init__.py").write_text("")
    (on_path / "libneuronxla" / "neuron_cc_cache.py").write_text("class CacheUrl: real = True")
    with neuron_emulation():
        assert hasattr(importlib.import_module("torch_neuronx.pyhlo.scribe"), "HloScribe")
        assert importlib.import_module("libneuronxla.neuron_cc_cache").CacheUrl.real
    with pytest.raises(ImportError, match="install the SDK"):
        importlib.import_module("torch_neuronx")


def test_the_compilers_command_is_on_the_path_inside_the_block_only() -> None:
    with neuron_emulation():
        command = shutil.which("neuronx-cc")
        assert command is not None
        refused = subprocess.run([command, "list-operators"], capture_output=True, text=True, check=False)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "neuronx-cc" in refused.stderr
    assert shutil.which("neuronx-cc") is None


def test_the_emulated_command_does_not_hide_a_real_compiler(on_path: Path) -> None:
    (on_path / "libneuronxla").mkdir()
    (on_path / "libneuronxla" / "__init__.py").write_text("")
    (on_path / "libneuronxla" / "neuron_cc_cache.py").write_text("class CacheUrl: real = True")
    with neuron_emulation():
        assert shutil.which("neuronx-cc") is None
