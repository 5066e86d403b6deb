"""A dense tiny checkpoint with a tokenizer, and a calibration text of its words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tiny_models import make_tiny
from word_tokenizer import word_tokenizer


@pytest.fixture
def dense(tmp_path: Path) -> Callable[..., Path]:
    """Write a dense tiny model: ``dense("qwen2", tied=True, dtype=torch.bfloat16, max_shard_size="20KB")``."""

    def make(
        model_type: str = "llama", *, tied: bool = False, dtype: torch.dtype = torch.float32, **saving: object
    ) -> Path:
        folder = tmp_path / f"dense-{model_type}"
        make_tiny(model_type, tied=tied, dtype=dtype).save_pretrained(folder, **saving)
        word_tokenizer().save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Write two thousand random words of the tiny vocabulary."""
    ids = torch.randint(3, 64, (2000,), generator=torch.Generator().manual_seed(1))
    file = tmp_path / "calibration.txt"
    file.write_text(" ".join(f"w{i}" for i in ids.tolist()))
    return file
