"""Inputs that several tests of the measuring verbs use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def choice_task(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Return a multiple-choice file, ``task.jsonl``, and its rows; the choices differ in their lengths."""
    rows = [
        {
            "id": i,
            "query": f"w{10 + i} w{20 + i}",
            "choices": [f"w{30 + i}", f"w{40 + i} w5 w6", "w7 w8"],
            "gold": i % 3,
        }
        for i in range(12)
    ]
    file = tmp_path / "task.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return file, rows
