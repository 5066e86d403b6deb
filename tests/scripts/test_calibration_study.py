"""The script that compares calibration texts, on a tiny model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from word_tokenizer import word_tokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_every_calibration_is_measured_on_every_text_and_a_second_start_adds_the_missing_one(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import calibration_study

    source, tokenizer, text = checkpoint(compressed=False), word_tokenizer(), tmp_path / "words.txt"
    text.write_text(" ".join(f"w{3 + n * n % 61}" for n in range(2000)))
    tokenizer.chat_template = "{% for m in messages %}w3 {{ m.content }} w4{% endfor %}"
    tokenizer.save_pretrained(source)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"query": f"w{n} w9"}) + "\n" for n in range(5, 15)))
    monkeypatch.setattr(calibration_study, "MEASURED", calibration_study.Rows(2, 24, 1))
    options = ["--wikitext", str(text), "--prose", str(text), "--questions", str(questions), "--rows", "8"]
    options += ["--length", "12", "--ratio", "0.4"]
    for calibrations in (["free+chat+code"], ["free+chat+code", "wikitext+python"]):
        command = ["study", str(source), "-o", str(tmp_path / "study"), *options, "--calibrations", *calibrations]
        monkeypatch.setattr(sys, "argv", command)
        calibration_study.main()
    results = json.loads((tmp_path / "study" / "study.json").read_text())
    assert list(results) == ["free+chat+code", "wikitext+python"]
    for result in results.values():
        assert list(result["distances"]) == [text.stem, "python", "chat", "answers with code"]
        known = {name: distance for name, distance in result["distances"].items() if name != "python"}  # w3, w4, ...
        assert all(distance["kl"] > 0.1 and distance["rows"] == 2 for distance in known.values())
    assert len(calibration_study.table(results)) == 4
    monkeypatch.setattr(sys, "argv", [*command, "--ratio", "0.3"])
    with pytest.raises(SystemExit, match="holds a study with other settings"):
        calibration_study.main()
