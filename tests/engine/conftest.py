"""Tokenizers, tiny checkpoints and Neuron hosts for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from neuron_cases import EVERY, MIXED, POSITIONS, emulated_engines
from neuronmm.engine.engine import Engine
from neuronmm.models.families import LAYERS, TARGETS
from neuronmm.models.neuronx import intermediate, sdk
from tiny_models import (
    compress_tiny,
    fill_tiny,
    make_tiny,
    pivot_high,
    pivot_tiny,
    shared_spec,
    vary_norms,
    write_checkpoint,
)
from word_tokenizer import word_tokenizer


@pytest.fixture(params=[name for name, host in sdk.HOSTS.items() if host.runtime == "hlo"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Each installed host with an HLO runtime, alone, with an empty compile cache."""
    name: str = request.param
    if not sdk.HOSTS[name].present:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setattr(sdk, "HOSTS", {name: sdk.HOSTS[name]})
    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    return name


@pytest.fixture
def neuron_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``neuron_checkpoint("qwen2", "mlp")``: tiny, and ``dense``, ``mlp``, ``mixed`` (see MIXED), ``shared``:
    one A for q, k, v and one for gate, up; ``pivoted``, ``high``: see ``pivot_tiny`` and ``pivot_high``."""

    def make(model_type: str = "llama", kind: str = "dense", dtype: torch.dtype = torch.float32) -> Path:
        folder, model = tmp_path / f"{model_type}-{kind}", vary_norms(make_tiny(model_type, dtype=dtype))
        if kind == "dense":
            model.save_pretrained(folder)
        elif kind == "shared":
            write_checkpoint(model, fill_tiny(model, shared_spec()), folder)
        elif kind == "pivoted":
            monkeypatch.setattr(intermediate, "TILE", 1)  # tiny ranks have no full tiles
            write_checkpoint(model, pivot_tiny(model), folder)
        elif kind == "high":
            write_checkpoint(model, pivot_high(model), folder)
        else:
            ranks = {f"{LAYERS}.{i}.{name}": EVERY[name] for i in range(2) for name in TARGETS["mlp"]}
            write_checkpoint(model, compress_tiny(model, MIXED if kind == "mixed" else ranks), folder)
        word_tokenizer().save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def neuron() -> Iterator[Callable[..., Engine]]:
    """``load(folder, backend="neuron", emulate=True, ...)``; the engines are closed after the test."""
    with emulated_engines(n_positions=POSITIONS) as make:
        yield make
