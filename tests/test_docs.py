"""The Python blocks of docs/models.md run unchanged, in order, on a tiny model instead of the demo's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tiny_models import tiny_checkpoint
from word_tokenizer import word_tokenizer

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"


def test_the_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_checkpoint(tmp_path / "out" / "smollm2-balanced")
    word_tokenizer().save_pretrained(tmp_path / "out" / "smollm2-balanced")
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    namespace: dict[str, Any] = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{DOCUMENT.name}, block {number}", "exec"), namespace)
    out = capsys.readouterr().out
    assert "LowRankLinear(" in out and "mlp.gate_proj has rank 12; asked ratio 0.2" in out
