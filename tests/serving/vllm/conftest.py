"""Tiny compressed checkpoints of sizes that vLLM's attention on a CPU supports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from neuronmm.models import CompressionSpec
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

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
"""vLLM's settings for tests: no network, a small cache, and no thread pinned to a core that others use."""

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Create a compressed checkpoint folder with a tokenizer: ``served("qwen2", "pivoted", torch.bfloat16)``."""
    made: dict[tuple[str, str, torch.dtype], Path] = {}

    def make(model_type: str = "llama", kind: str = "two", dtype: torch.dtype = torch.float32) -> Path:
        if (model_type, kind, dtype) not in made:
            torch.manual_seed(0)
            model = vary_norms(make_tiny(model_type, dtype=dtype, **SHAPE))
            folder = tmp_path_factory.mktemp(f"{model_type}-{kind}")
            write_checkpoint(model, fill_tiny(model, KINDS[kind]()), folder)
            word_tokenizer().save_pretrained(folder)
            made[model_type, kind, dtype] = folder
        return made[model_type, kind, dtype]

    return make


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Set ``ENVIRONMENT``, and return it."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    yield ENVIRONMENT
