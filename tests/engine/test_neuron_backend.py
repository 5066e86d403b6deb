"""The Neuron backend without a host: detection of the SDK, supported versions, and a device without the emulator."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from neuronmm.emulator.runtime import neuron_emulation
from neuronmm.engine.backends import BACKENDS
from neuronmm.engine.engine import load
from neuronmm.models import UserError
from neuronmm.models.neuronx import sdk
from neuronmm.models.neuronx.graph import sums_before_b

HOST = sdk.HOSTS["transformers-neuronx"]


@pytest.mark.parametrize("version", ["2.16.345.0+69131dd3", "2.17.194.0+d312836f", "2.21.33363.0+82129205"])
def test_supported_compilers(version: str) -> None:
    sdk.check_compiler(version, HOST)


@pytest.mark.parametrize(("version", "age"), [("2.15.143.0", "old"), ("1.24.0", "old"), ("2.22.12471.0", "new")])
def test_unsupported_compilers(version: str, age: str) -> None:
    with pytest.raises(UserError, match=f"neuronx-cc {version} is too {age} .* install 2.16 to 2.21"):
        sdk.check_compiler(version, HOST)


def test_a_machine_without_cores_refuses() -> None:
    if list(Path("/dev").glob("neuron[0-9]*")):
        pytest.skip("this machine has NeuronCores")
    with pytest.raises(UserError, match=r"tp_degree 2: this machine has 0 NeuronCores in 0 devices"):
        sdk.check_cores(2)


@pytest.mark.parametrize(("version", "age"), [("2.14.1", "old"), ("2.22.12471.0+b4a00d10", "new")])
def test_an_unsupported_sdk_is_refused_before_the_host_is_imported(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, version: str, age: str
) -> None:
    monkeypatch.setattr(sdk, "choose", lambda name: replace(HOST, adapter="nowhere"))
    monkeypatch.setattr(sdk, "missing", lambda name: None)
    monkeypatch.setattr(sdk, "compiler_version", lambda: version)
    monkeypatch.setattr(sdk, "check_cores", lambda wanted: None)
    with pytest.raises(UserError, match=re.escape(f"neuronx-cc {version} is too {age}")):
        load(checkpoint(), backend="neuron")


def test_emulating_without_a_host_says_which_to_install(checkpoint: Callable[..., Path]) -> None:
    if any(host.present for host in sdk.HOSTS.values()):
        pytest.skip("a host is installed")
    assert BACKENDS["neuron"].missing(emulate=True) is None
    with pytest.raises(UserError, match=r"no Neuron host is present .* pip install --no-deps optimum-neuron==0.2.0"):
        load(checkpoint(), backend="neuron", emulate=True)
    with neuron_emulation() as session:  # the failed load has ended its own
        assert not session.calls


DEVICE = """
import json, sys
import torch
from types import SimpleNamespace
from neuronmm import cli
from neuronmm.engine.backends import neuron
from neuronmm.models.neuronx import sdk

class Model:
    def __init__(self, shards, settings):
        self.shards = shards
    def to_neuron(self):
        assert len(self.shards.layer(0)) > 5
    def save(self, folder):
        pass
    def __call__(self, ids, cache_ids, start_ids):
        return torch.nn.functional.one_hot((ids[:, -1] + 1) % 64, 64).float()

sdk.missing = lambda name: None
sdk.choose = lambda name: sdk.HOSTS["optimum-neuron"]
sdk.check_cores = lambda wanted: None
sdk.adapter = lambda host: SimpleNamespace(NAME="host", VERSION="1", Model=Model)
status = cli.main(["generate", sys.argv[1], "--prompt", "w7", "--backend", "neuron", "--max-new-tokens", "3", "--json"])
print(json.dumps([status, [name for name in sys.modules if name.startswith("neuronmm.emulator")]]))
"""


def test_a_device_does_not_import_the_emulator(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", DEVICE, str(checkpoint())]
    environment = {"NEURONMM_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    result, last = process.stdout.splitlines()
    assert json.loads(result)["token_ids"] == [8, 9, 10]
    assert json.loads(last) == [0, []]
    assert "NeuronCores, tp 1" in process.stderr


def test_the_cheaper_all_reduce() -> None:
    """A decode step sums after B. A long prompt sums before B if the rank is small: with two cores, below a third."""
    assert not sums_before_b(655, 2048, 1, 2, 2)
    assert sums_before_b(512, 2048, 2048, 2, 2)
    assert not sums_before_b(1280, 2048, 4096, 2, 2)
    assert sums_before_b(896, 2048, 4096, 2, 32)
