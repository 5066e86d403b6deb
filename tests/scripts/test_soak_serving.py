"""The soak of the server on a tiny model: its table, and what it would notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from several import free_port
from tiny_models import tiny_checkpoint
from word_tokenizer import word_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak_serving.py"


@pytest.mark.slow
def test_a_short_soak_puts_its_table_into_the_page(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "tiny")
    word_tokenizer().save_pretrained(tmp_path / "tiny")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- soak: begin -->\nold\n<!-- soak: end -->\nafter\n")
    options = [
        "--streams",
        "4",
        "--minutes",
        "0.1",
        "--prompts",
        "3",
        "--new",
        "6",
        "--longest",
        "40",
        "--page",
        str(page),
    ]
    command = [sys.executable, str(SCRIPT), str(tmp_path / "tiny"), *options, "--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text()
    assert text.startswith("before\n<!-- soak: begin -->\n| measured") and text.endswith("<!-- soak: end -->\nafter\n")
    assert "| lost or with another text than alone | 0 |" in text and "old" not in text
