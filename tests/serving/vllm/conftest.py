"""Tiny compressed checkpoints of sizes that vLLM's attention on a CPU supports."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from neuronmm.kernels.low_bits import dense
from neuronmm.models import CompressionSpec, LowRankLinear
from tiny_models import (
    RANKS,
    fill_tiny,
    layer_ranks,
    make_spec,
    make_tiny,
    pivoted_spec,
    shared_spec,
    vary_norms,
    write_checkpoint,
)
from word_tokenizer import word_tokenizer

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
}
KINDS: dict[str, Callable[[], CompressionSpec]] = {
    "two": lambda: make_spec(layer_ranks(tuple(RANKS))),  # v and o are dense
    "shared": shared_spec,
    "pivoted": pivoted_spec,
    "pivoted-shared": lambda: pivoted_spec(shared=True),
    "int8": lambda: shared_spec(factors="int8"),
    "pivoted-int8": lambda: pivoted_spec(factors="int8"),
}
"""Every form: two factors, ragged ranks and dense linears; a shared A; pivots by range and index; and int8."""


class Served(NamedTuple):
    """A compressed checkpoint, and the same matrices in a dense one, which vLLM serves without the plugin."""

    compressed: Path
    dense: Path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Served]:
    """Create checkpoint folders with a tokenizer: ``served("qwen2", "pivoted", torch.bfloat16)``."""

    @cache
    def make(
        model_type: str = "llama", kind: str = "two", dtype: torch.dtype = torch.float32, tied: bool = False
    ) -> Served:
        folders = Served(*(tmp_path_factory.mktemp(f"{model_type}-{kind}") for _ in range(2)))
        torch.manual_seed(0)
        model = vary_norms(make_tiny(model_type, dtype=dtype, tied=tied, **SHAPE))
        write_checkpoint(model, fill_tiny(model, KINDS[kind]()), folders.compressed)
        for name, module in list(model.named_modules()):
            if isinstance(module, LowRankLinear):
                model.set_submodule(name, dense_linear(module, dtype))
        model.save_pretrained(folders.dense)
        for folder in folders:
            word_tokenizer().save_pretrained(folder)
        return folders

    return make


def dense_linear(module: LowRankLinear, dtype: torch.dtype) -> torch.nn.Linear:
    """The linear of rank r as a dense one."""
    factors = module.factors.expanded()
    weight = dense(factors.B, torch.float32).float() @ dense(factors.A, torch.float32).float()
    linear = torch.nn.Linear(module.in_features, module.out_features, factors.bias is not None)
    linear.weight = torch.nn.Parameter(weight.to(dtype))
    if factors.bias is not None:
        linear.bias = torch.nn.Parameter(factors.bias.detach().to(dtype))
    return linear


@pytest.fixture(scope="session")
def settings() -> dict[str, str]:
    """The environment variables of a vLLM process: no network, a small cache, and no thread pinned to a core."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }


@pytest.fixture
def environment(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Set these variables for the test."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
