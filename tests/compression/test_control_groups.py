"""A container's limit counts as the memory of the machine."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import pytest

from neuronmm.compression import control_groups, memory
from neuronmm.compression.control_groups import free_in_groups

GB = 1 << 30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(control_groups, "_MOUNTED", tmp_path / "mounted")
    return tmp_path


def group(folder: Path, version: int, limit: object, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    total = "total_" if version == 1 else ""
    halves = f"{total}active_file {cached // 2}\n{total}inactive_file {cached - cached // 2}\n"
    (folder / "memory.stat").write_text(f"anon 5\n{halves}")


def test_the_tightest_group_on_the_way_up_counts(system: Path) -> None:
    (system / "own").write_text("0::/service/worker\n")
    group(system / "mounted" / "service" / "worker", 2, "max", 3 * GB, GB)
    assert free_in_groups() == math.inf
    group(system / "mounted" / "service", 2, 8 * GB, 5 * GB, 2 * GB)
    assert free_in_groups() == 5 * GB
    group(system / "mounted" / "service" / "worker", 2, 4 * GB, 3 * GB, GB)
    assert free_in_groups() == 2 * GB


def test_a_container_of_the_first_version_sees_its_limit_at_the_top(system: Path) -> None:
    """Its path is that of the machine, which the container does not see."""
    (system / "own").write_text("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    group(system / "mounted" / "memory", 1, 2 * GB, 2 * GB, GB)
    assert free_in_groups() == GB
    (system / "own").write_text("5:cpu,cpuacct:/docker/abc\n")
    assert free_in_groups() == math.inf


def test_other_systems_have_no_groups(system: Path) -> None:
    assert free_in_groups() == math.inf


def test_free_memory_is_what_the_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_in_groups", lambda: 1000.0)
    assert memory.free_memory("cpu") == 1000
    monkeypatch.setattr(memory, "free_in_groups", lambda: math.inf)
    assert 1000 < memory.free_memory("cpu") <= psutil.virtual_memory().total
