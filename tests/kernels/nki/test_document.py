"""The Python block of docs/nki.md runs unchanged."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[3] / "docs" / "nki.md"


def test_the_block_runs() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile(block, DOCUMENT.name, "exec"), {})
