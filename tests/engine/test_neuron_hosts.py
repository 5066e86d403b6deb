"""The choice of a Neuron host by what is present or by name, on stand-ins for the packages; and its error lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from neuronmm import cli
from neuronmm.engine.backends import BACKENDS
from neuronmm.engine.backends.neuron import NeuronOptions
from neuronmm.engine.engine import load
from neuronmm.models import UserError
from neuronmm.models.neuronx import sdk


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``packages("nxd-inference")``: only these hosts are present, as folders with the files that prove them real."""
    found: dict[str, list[str]] = {}
    monkeypatch.setattr(sdk, "find_spec", lambda name: _Spec(found[name]) if name in found else None)

    def install(*names: str) -> None:
        for name in names:
            host = sdk.HOSTS[name]
            folder = tmp_path / host.package
            (folder / host.proof).parent.mkdir(parents=True, exist_ok=True)
            (folder / host.proof).touch()
            found[host.package] = [str(folder)]

    return install


class _Spec:
    def __init__(self, places: list[str]) -> None:
        self.submodule_search_locations = places


def test_the_first_host_that_is_present_is_chosen(packages: Callable[..., None]) -> None:
    packages("nxd-inference")
    assert sdk.choose().name == "nxd-inference"
    packages("optimum-neuron")
    assert sdk.choose().name == "optimum-neuron"
    packages("transformers-neuronx")
    assert sdk.choose().name == "transformers-neuronx"
    assert sdk.choose("nxd-inference").name == "nxd-inference"


def test_an_empty_package_is_no_host(packages: Callable[..., None], tmp_path: Path) -> None:
    packages("nxd-inference")
    (tmp_path / "neuronx_distributed_inference" / "models" / "application_base.py").unlink()
    with pytest.raises(UserError, match=r"no Neuron host is present \(transformers-neuronx, optimum-neuron, nxd-"):
        sdk.choose()


def test_a_host_that_is_absent_or_unknown(packages: Callable[..., None]) -> None:
    packages("optimum-neuron")
    with pytest.raises(UserError, match=r"the Neuron host nxd-inference is not present; .* PYTHONPATH"):
        sdk.choose("nxd-inference")
    with pytest.raises(UserError, match="unknown Neuron host 'tnx'; there are: transformers-neuronx, optimum-neuron"):
        sdk.choose("tnx")


def test_without_the_sdk_the_line_names_the_hosts_own(packages: Callable[..., None]) -> None:
    packages("nxd-inference")
    reason = BACKENDS["neuron"].missing(host="nxd-inference")
    assert reason is not None and "Neuron SDK (2.29 to 2.31) and nxd-inference" in reason and "--emulate" in reason
    assert BACKENDS["neuron"].missing(emulate=True, host="nxd-inference") is None


@pytest.mark.parametrize(("version", "age"), [("2.21.33363.0", "old"), ("2.28.7631.0", "new")])
def test_compilers_that_nxd_is_not_in(version: str, age: str) -> None:
    """2.24 is that of SDK 2.29, 2.28 that of SDK 2.33."""
    host = sdk.HOSTS["nxd-inference"]
    sdk.check_compiler("2.24.5133.0+emu", host)
    with pytest.raises(UserError, match=rf"{version} is too {age} for nxd-inference .* install 2.24 to 2.26"):
        sdk.check_compiler(version, host)


def test_the_layout_is_the_hosts(packages: Callable[..., None], checkpoint: Callable[..., Path]) -> None:
    packages("nxd-inference")
    host = sdk.HOSTS["nxd-inference"]
    assert NeuronOptions().settings(torch.float32, 128, host).layout == "BSH"
    assert NeuronOptions().settings(torch.float32, 128, sdk.HOSTS["optimum-neuron"]).layout == "HSB"
    with pytest.raises(UserError, match="layout 'HSB': nxd-inference has only BSH"):
        load(checkpoint(), backend="neuron", emulate=True, layout="HSB")


@pytest.mark.parametrize("option", ["--host", "--neuron-host"])
def test_the_command_line(
    packages: Callable[..., None], checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str], option: str
) -> None:
    packages("nxd-inference")
    command = ["generate", str(checkpoint()), "--prompt", "w7", "--backend", "neuron", "--emulate", option, "optimum"]
    assert cli.main(command) == 2
    assert "unknown Neuron host 'optimum'" in capsys.readouterr().err
    assert cli.main([*command[:-1], "nxd-inference", "--impl", "reference"]) == 2
    assert "kernel 'reference' is not for backend neuron" in capsys.readouterr().err
