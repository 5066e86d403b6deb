"""The key of a compiled graph depends on everything that the graph depends on, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from neuronmm.models.neuronx import cache, sdk
from neuronmm.models.neuronx.checkpoint import Checkpoint
from neuronmm.models.neuronx.settings import Settings
from neuronmm.models.neuronx.weights import Shards
from tiny_models import compress_tiny, layer_ranks, make_tiny, write_checkpoint

SETTINGS = Settings(torch.float32, n_positions=64)


@pytest.fixture
def low(tmp_path: Path) -> Callable[..., Path]:
    """A tiny compressed checkpoint, ``low(seed=1, gate=9)`` with other weights, or another rank of gate."""

    def make(seed: int = 0, gate: int = 12) -> Path:
        torch.manual_seed(seed)
        model = make_tiny()
        ranks = {name: gate if "gate" in name else rank for name, rank in layer_ranks().items()}
        return write_checkpoint(model, compress_tiny(model, ranks), tmp_path / f"{seed}-{gate}")

    return make


def key(folder: Path, settings: Settings = SETTINGS, host: str = "host 1") -> str:
    return cache.key(Shards(Checkpoint(folder, settings.dtype), settings.tp_degree), settings, host)


def test_weights_do_not_matter(low: Callable[..., Path]) -> None:
    assert key(low(seed=0)) == key(low(seed=1)) == key(low(seed=0))


def test_ranks_and_hosts_do(low: Callable[..., Path]) -> None:
    folder = low()
    assert len({key(folder), key(low(gate=9)), key(folder, host="host 2")}) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.bfloat16}, {"tp_degree": 2}, {"batch_size": 2}, {"n_positions": 65}, {"layout": "BSH"},
        {"continuous": True},
    ],
    ids=str,
)  # fmt: skip
def test_settings_do(low: Callable[..., Path], change: dict) -> None:
    assert key(low()) != key(low(), replace(SETTINGS, **change))


def test_versions_flags_and_code_do(low: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Code: that of the kernels, of their tiling and of the weights' layout."""
    found, folder = [key(low())], low()
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    found.append(key(folder))
    versions = sdk.versions()
    monkeypatch.setattr(sdk, "versions", lambda: {**versions, "neuronx-cc": "2.21.33363.0"})
    found.append(key(folder))
    read = Path.read_bytes
    for changed in ("tiling.py", "layout.py", "low_rank_mlp.py", "graph.py"):
        monkeypatch.setattr(
            Path, "read_bytes", lambda self, name=changed: read(self) + (b"# changed" if self.name == name else b"")
        )
        found.append(key(folder))
    assert len(set(found)) == len(found) == 7
    assert key(folder) == found[-1]
