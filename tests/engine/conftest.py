"""Tokenizers made on the spot, and tiny checkpoints with them, for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from words import word_tokenizer

from neuronmm.models import CompressionSpec
from neuronmm.models.families import TARGETS
from tiny import fill_tiny, make_tiny, tiny_checkpoint, write_checkpoint


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """One token a word: ``w3`` to ``w63`` have the ids 3 to 63, as a tiny model's vocabulary has."""
    return word_tokenizer()


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE with next to no merges: characters beyond ASCII take several tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=262, special_tokens=["</s>"], initial_alphabet=alphabet)
    raw.train_from_iterator(["the stop of the stopping step"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")


@pytest.fixture
def checkpoint(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Callable[..., Path]:
    """Makes a tiny checkpoint folder with a tokenizer: ``checkpoint("qwen2", compressed=True, tied=False)``.

    A ``spec`` says how it is compressed.
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
