"""The studies of reliability, with few inputs: they find nothing in the code as it is, and each finds a planted fault.

The whole studies are ``python scripts/faults``; docs/results/reliability.md has their figures.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

NAMES = ("fuzz_config", "fuzz_weights", "fuzz_templates", "kills", "places", "plants", "soak", "tally")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The modules of scripts/faults."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "faults"))
    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path / "cache"))
    modules = SimpleNamespace(**{name: __import__(name) for name in NAMES})
    monkeypatch.setattr(modules.tally, "SECONDS", 3)
    return modules


def problems(result: Any) -> list[str]:
    if not isinstance(result, dict):
        return []
    return [*result.get("findings", []), *(one for value in result.values() for one in problems(value))]


@pytest.mark.parametrize("study", ["headers", "index", "values", "gguf"])
def test_damaged_weights(study: str, faults: SimpleNamespace, tmp_path: Path) -> None:
    result = getattr(faults.fuzz_weights, study)(20, tmp_path)
    assert result["inputs"] == 20 and result["findings"] == [] and result["one_clear_line"] > 5


@pytest.mark.parametrize(
    ("study", "plant"),
    [
        ("headers", "uncaught_shard"),
        ("index", "any_index"),
        ("values", "unchecked_tensors"),
        ("gguf", "uncaught_gguf"),
    ],
)
def test_damaged_weights_that_nobody_checks(study: str, plant: str, faults: SimpleNamespace, tmp_path: Path) -> None:
    with getattr(faults.plants, plant)():
        assert getattr(faults.fuzz_weights, study)(40, tmp_path)["findings"]


def test_config_json(faults: SimpleNamespace, tmp_path: Path) -> None:
    result = faults.fuzz_config.study(60, tmp_path, every=4)
    assert result["findings"] == [] and min(result["right_results"], result["one_clear_line"]) > 5


@pytest.mark.parametrize("plant", ["unchecked_config", "wrong_epsilon"])
def test_a_config_json_that_is_taken_as_it_is(plant: str, faults: SimpleNamespace, tmp_path: Path) -> None:
    with getattr(faults.plants, plant)():
        assert faults.fuzz_config.study(60, tmp_path, every=4)["findings"]


def test_chat_templates(faults: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults.fuzz_templates.chat, "CPU_SECONDS", 1)
    with faults.plants.unbounded_templates():
        assert any("Hang" in one for one in faults.fuzz_templates.study(tmp_path / "planted", 1)["findings"])


def test_what_a_process_holds(faults: SimpleNamespace) -> None:
    assert faults.soak.watch(20, 2, lambda number: None)["findings"] == []
    leaks = faults.soak.watch(20, 2, lambda number: faults.plants.leak())["findings"]
    assert len(leaks) == 2 and leaks[0].startswith("files: ") and leaks[1].startswith("memory grows by")


@pytest.mark.slow
def test_kills(faults: SimpleNamespace, tmp_path: Path) -> None:
    assert problems(faults.kills.study(3, tmp_path / "work")) == []
    assert problems(faults.kills.study(30, tmp_path / "planted", plant=faults.plants.write_in_place))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mounts small disks")
def test_places(faults: SimpleNamespace, tmp_path: Path) -> None:
    assert problems(faults.places.study(tmp_path / "work")) == []
    assert problems(faults.places.full_disks(tmp_path / "planted", faults.plants.full_disk_is_success))
