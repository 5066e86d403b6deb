"""What the documents contain that runs: fenced blocks, and the notebook."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"


def blocks(name: str, language: str) -> list[str]:
    """Return the fenced blocks of one language in ``docs/<name>``, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)
