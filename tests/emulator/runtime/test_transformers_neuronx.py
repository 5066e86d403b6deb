"""transformers-neuronx, unmodified, generates HF's tokens on the emulated runtime. Skipped without its source."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from neuronmm.emulator.runtime import neuron_emulation

PROMPT = torch.tensor([[1, 17, 5, 88, 42, 9, 60], [1, 3, 71, 71, 20, 35, 8]])
NEW = 12
BSH = {"attention_layout": "BSH", "collectives_layout": "BSH"}


@pytest.fixture(autouse=True)
def host() -> None:
    with neuron_emulation():
        try:
            importlib.import_module("transformers_neuronx.llama.model")
        except ImportError as error:
            pytest.skip(f"transformers-neuronx is not importable: {error}")


def load(folder: Path, neuron: dict[str, Any] | None = None, **options: Any) -> Any:
    """Load a checkpoint with transformers-neuronx' own model class. Call it inside the emulation."""
    from transformers_neuronx.config import NeuronConfig
    from transformers_neuronx.llama.model import LlamaForSampling

    options = {"n_positions": 32, "batch_size": 1, "amp": "f32", "tp_degree": 2, **options}
    model = LlamaForSampling.from_pretrained(folder, neuron_config=NeuronConfig(**neuron or {}), **options)
    model.to_neuron()
    return model


def tokens_of_hf(model: LlamaForCausalLM, prompt: torch.Tensor) -> torch.Tensor:
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "neuron"),
    [
        ({"tp_degree": 1}, {}),
        ({"batch_size": 2}, {}),
        ({"batch_size": 2}, BSH),
        ({}, {"fuse_qkv": True}),
        ({"n_positions": [16, 32], "context_length_estimate": [8, 16]}, {}),
        ({"unroll": 1, "tp_degree": 1}, {}),
        ({}, {"on_device_embedding": True}),
        ({"context_length_estimate": 16}, {"sequence_parallel_norm": True, "sequence_parallel_norm_threshold": 4}),
    ],
    ids=str,
)
def test_greedy_tokens_equal_those_of_hf(
    llama: tuple[Path, LlamaForCausalLM], options: dict[str, Any], neuron: dict[str, Any]
) -> None:
    folder, reference = llama
    prompt = PROMPT[: options.get("batch_size", 1)]
    with neuron_emulation():
        tokens = load(folder, neuron, **options).sample(prompt, sequence_length=7 + NEW, top_k=1)
    assert torch.equal(tokens, tokens_of_hf(reference, prompt))


def test_a_continuous_batch_gives_the_tokens_of_hf(llama: tuple[Path, LlamaForCausalLM]) -> None:
    folder, reference = llama
    with neuron_emulation():
        from transformers_neuronx.config import ContinuousBatchingConfig

        continuous = ContinuousBatchingConfig(batch_size_for_shared_caches=2)
        model = load(folder, {"continuous_batching": continuous}, batch_size=2)
        slots, tokens = torch.arange(2), PROMPT
        logits = model(PROMPT, cache_ids=torch.arange(7).expand(2, -1), start_ids=slots)
        for step in range(NEW):
            next_token = logits.argmax(-1)[:, None]
            tokens = torch.cat([tokens, next_token], 1)
            logits = model(next_token, cache_ids=torch.full((2, 1), 7 + step), start_ids=slots)
    assert torch.equal(tokens, tokens_of_hf(reference, PROMPT))


def test_arg_max_on_the_device_gives_the_tokens_of_hf(llama: tuple[Path, LlamaForCausalLM]) -> None:
    folder, reference = llama
    with neuron_emulation() as session:
        from transformers_neuronx.config import GenerationConfig

        model = load(folder, {"on_device_generation": GenerationConfig(top_k=1, do_sample=False)})
        tokens = model.sample(PROMPT[:1], sequence_length=7 + NEW)
    assert torch.equal(tokens, tokens_of_hf(reference, PROMPT[:1]))
    assert session.calls["AwsNeuronArgMax"] > 0


def test_bfloat16_logits_are_within_twice_the_error_of_torch(llama: tuple[Path, LlamaForCausalLM]) -> None:
    """Compares the first logits with those of float32."""
    folder, reference = llama
    with neuron_emulation():
        model = load(folder, amp="bf16")
        logits = model(PROMPT[:1])
    with torch.no_grad():
        exact = reference(PROMPT[:1]).logits[:, -1]
        plain = LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16)(PROMPT[:1]).logits[:, -1].float()
    assert (logits - exact).norm() <= 2 * (plain - exact).norm()
