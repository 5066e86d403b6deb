"""The script that measures what rounded factors cost, on a tiny model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from word_tokenizer import word_tokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_fp8_costs_more_than_int8_and_the_checkpoint_stays(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import rounding_study

    low, text, out = checkpoint(), tmp_path / "words.txt", tmp_path / "study.json"
    word_tokenizer().save_pretrained(low)
    text.write_text(" ".join(f"w{3 + n * n % 61}" for n in range(200)))
    before = {file.name: file.read_bytes() for file in low.iterdir()}
    command = ["study", str(low), "--text", str(text), "--limit", "3", "--context", "32", "-o", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    rounding_study.main()
    (figures,) = json.loads(out.read_text()).values()
    assert list(figures) == ["model", "int8", "fp8"]
    distances = [one["words"]["kl"] for one in figures.values()]
    assert abs(distances[0]) < 1e-9 < distances[1] < distances[2]
    assert figures["fp8"]["bytes"] < figures["model"]["bytes"]
    assert len(rounding_study.table({"low": figures})) == 5
    assert {file.name: file.read_bytes() for file in low.iterdir()} == before
