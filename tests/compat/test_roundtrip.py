"""The short run for every supported generation of transformers: load, save, generate and train a compressed model.

``make test`` runs this folder on the oldest supported transformers as well as on the newest.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import __version__ as transformers_version

from neuronmm.models import FAMILIES, LowRankSwiGLU
from neuronmm.models.families import TARGETS
from tiny import load_plain, make_tokens, tiny_checkpoint

OLD = tuple(int(part) for part in transformers_version.split(".")[:2]) < (4, 51)
TYPES = [
    pytest.param(
        name, marks=pytest.mark.skipif(OLD and name == "qwen3", reason="transformers before 4.51 has no Qwen3")
    )
    for name in FAMILIES
]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", TYPES)
def test_plain_from_pretrained_and_resave_give_identical_logits(model_type: str, tied: bool, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "one", model_type, tied=tied)
    tokens = make_tokens()
    with torch.no_grad():
        expected = model(tokens).logits
        loaded = load_plain(tmp_path / "one")
        assert torch.equal(loaded(tokens).logits, expected)
        loaded.save_pretrained(tmp_path / "two")
        again = load_plain(tmp_path / "two")
        assert torch.equal(again(tokens).logits, expected)
    assert sum(isinstance(module, LowRankSwiGLU) for module in again.modules()) == 2


def test_generate_gives_the_tokens_of_the_model_it_was_saved_from(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "out")
    tokens = make_tokens()
    expected = model.generate(tokens, max_new_tokens=12, do_sample=False)
    assert torch.equal(load_plain(tmp_path / "out").generate(tokens, max_new_tokens=12, do_sample=False), expected)


def test_lora_trains_and_merges(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "out")
    tokens = make_tokens()
    lora = get_peft_model(load_plain(tmp_path / "out"), LoraConfig(r=2, target_modules=["A", "B"]))
    optimizer = torch.optim.SGD([p for p in lora.parameters() if p.requires_grad], lr=0.1)
    before = lora(tokens, labels=tokens).loss
    before.backward()
    optimizer.step()
    after = lora(tokens, labels=tokens).loss
    assert after < before
    merged = lora.merge_and_unload()
    assert torch.allclose(merged(tokens, labels=tokens).loss, after, atol=1e-5)


def test_attention_linears_too(tmp_path: Path) -> None:
    model = tiny_checkpoint(
        tmp_path / "out", "qwen2", linears=(*TARGETS["mlp"], "self_attn.q_proj", "self_attn.k_proj")
    )
    tokens = make_tokens()
    with torch.no_grad():
        assert torch.equal(load_plain(tmp_path / "out")(tokens).logits, model(tokens).logits)
