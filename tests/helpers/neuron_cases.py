"""Shared by the tests of the Neuron hosts: prompts, ranks, kernel counts, engines, and what is expected of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from error_rule import assert_twice_plain
from neuronmm.engine.backends.neuron import NeuronRunner
from neuronmm.engine.engine import Engine, load
from neuronmm.engine.sampling import SamplingParams
from neuronmm.models.families import LAYERS
from word_tokenizer import word_tokenizer

NEW = 64
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
PROMPTS = ["w7 w8 w9", "w11 w12 w13 w14 w15"]
POSITIONS = 80
EVERY = {
    "self_attn.q_proj": 8, "self_attn.k_proj": 4, "self_attn.v_proj": 5, "self_attn.o_proj": 7,
    "mlp.gate_proj": 12, "mlp.up_proj": 16, "mlp.down_proj": 8,
}  # fmt: skip
MIXED = {**{f"{LAYERS}.0.{name}": rank for name, rank in EVERY.items()}, f"{LAYERS}.1.mlp.gate_proj": 12}
"""Layer 0 is all low-rank, with five kernels; layer 1 is dense except for gate, with one kernel."""
KERNELS = {"dense": 0, "mlp": 2, "shared": 2 * 4, "mixed": 5 + 1, "pivoted": 2 + 2, "high": 1 + 1}
"""NKI kernels in the graph of a two-layer model, by kind of checkpoint."""
NORMS = {"dense": 2 * 2 + 1, "mlp": 2 + 1, "shared": 1, "mixed": 2 + 1, "pivoted": 2 + 1, "high": 2 + 1 + 1}
"""Norms of the hidden state in that graph that no kernel applies, including the final norm."""


def neuron_host(engine: Engine) -> NeuronRunner:
    assert isinstance(engine.runner, NeuronRunner)
    return engine.runner


def cpu_tokens(folder: Path, prompts: list[str]) -> list[list[int]]:
    engine = load(folder, backend="cpu", dtype="fp32")
    engine.tokenizer = word_tokenizer()
    return [result.token_ids for result in engine.generate(prompts, PARAMS)]


@contextmanager
def emulated_engines(**defaults: Any) -> Iterator[Callable[..., Engine]]:
    """Yield ``make(folder, ...)``: an emulated engine in float32 with these defaults; all are closed at the end."""
    loaded: list[Engine] = []

    def make(folder: Path, **options: Any) -> Engine:
        engine = load(folder, backend="neuron", **{"amp": "fp32", "emulate": True, **defaults, **options})
        engine.tokenizer = word_tokenizer()
        loaded.append(engine)
        return engine

    yield make
    for engine in loaded:
        neuron_host(engine).close()


def assert_near_float32(folder: Path, engine: Engine, tokens: Tensor) -> None:
    """Assert the rule for bfloat16 logits, after a prompt of 5 tokens and after each later token."""
    plain, exact = (load(folder, backend="cpu", dtype=dtype, impl="naive") for dtype in ("bf16", "fp32"))

    def logits(engine: Engine) -> Tensor:
        decoder = engine.runner.decoder(*tokens.shape)
        steps = [decoder.prefill(tokens[:, :5], torch.ones(len(tokens), 5, dtype=torch.long))]
        steps += [decoder.decode(token) for token in tokens[:, 5:].T]
        return torch.stack(steps).to(torch.bfloat16 if engine is not exact else torch.float32)

    assert_twice_plain([None], lambda _: logits(engine), lambda _: logits(plain), lambda _: logits(exact))
