"""vLLM with the plugin generates the tokens of this project's engine, for every family, form and dtype."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import neuronmm
from neuronmm.engine.sampling import SamplingParams

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm makes an environment for it")

PROMPTS = [list(range(3, 3 + length)) for length in (5, 17, 40)]
"""Together more rows than the core's GEMV takes."""
NEW = 12


@pytest.fixture
def llm(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Load a folder with vLLM, in this process."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    threads = torch.get_num_threads()

    def load(folder: Path, **options: Any) -> Any:
        return LLM(str(folder), **{"enforce_eager": True, "max_model_len": 128, "max_num_seqs": 8, **options})

    set_num_threads = torch.set_num_threads
    yield load
    torch.set_num_threads = set_num_threads  # vLLM replaces it
    torch.set_num_threads(threads)
    gc.collect()
    cleanup_dist_env_and_memory()


def ours(folder: Path) -> list[list[int]]:
    prompts = [" ".join(f"w{token}" for token in prompt) for prompt in PROMPTS]
    greedy = SamplingParams(max_new_tokens=NEW, temperature=0, ignore_eos=True)
    return [result.token_ids for result in neuronmm.load(folder, backend="cpu").generate(prompts, greedy)]


def theirs(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    greedy = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize(
    ("model_type", "kind", "dtype"),
    [
        ("llama", "two", torch.float32),
        ("qwen2", "shared", torch.float32),
        ("qwen2", "pivoted", torch.float32),
        ("qwen3", "pivoted-shared", torch.float32),
        ("llama", "int8", torch.bfloat16),
        ("qwen3", "pivoted-int8", torch.bfloat16),
    ],
)
def test_the_tokens_are_those_of_our_engine(
    model_type: str, kind: str, dtype: torch.dtype, served: Callable[..., Path], llm: Callable[..., Any]
) -> None:
    folder = served(model_type, kind, dtype)
    assert theirs(llm(folder)) == ours(folder)
