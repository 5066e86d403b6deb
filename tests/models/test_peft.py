"""LoRA on a compressed model: adapters on the factors train, save, load and merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from neuronmm.models import LowRankSwiGLU, fuse
from tiny_models import load_plain, logits, tiny_checkpoint, train_tiny

TARGETS: list[Any] = [["A", "B"], ["B", "q_proj", "v_proj"], "all-linear"]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_train_save_load_and_merge(targets: Any, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base")
    lora = get_peft_model(load_plain(tmp_path / "base"), LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    losses = train_tiny(lora)
    assert losses[-1] < losses[0]
    trained = logits(lora.eval())
    lora.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load_plain(tmp_path / "base"), tmp_path / "adapter").eval()
    assert torch.allclose(logits(again), trained, atol=1e-5)
    merged = again.merge_and_unload()
    assert torch.allclose(logits(merged), trained, atol=1e-3)
    assert torch.allclose(logits(fuse(merged)), trained, atol=1e-3)


def test_the_merged_model_saves_as_a_compressed_checkpoint(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base")
    lora = get_peft_model(load_plain(tmp_path / "base"), LoraConfig(r=2, target_modules=["A", "B"]))
    train_tiny(lora)
    merged = lora.merge_and_unload().eval()
    merged.save_pretrained(tmp_path / "merged")
    again = load_plain(tmp_path / "merged")
    assert torch.equal(logits(again), logits(merged))
    assert any(isinstance(m, LowRankSwiGLU) for m in again.modules())


def test_full_fine_tuning_trains_the_factors(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base")
    model = load_plain(tmp_path / "base")
    before = {name: p.detach().clone() for name, p in model.named_parameters() if ".A." in name or ".B." in name}
    losses = train_tiny(model.train())
    assert losses[-1] < losses[0]
    assert all(not torch.equal(dict(model.named_parameters())[name], p) for name, p in before.items())
