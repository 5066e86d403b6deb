"""The calibration texts that come with the package: ``prose`` and ``code``.

The prose is in the public domain: the World Factbook of the United States' government, their presidents' addresses on
the state of the Union from 1961 to 2016, and Herman Melville's Moby Dick, in pieces of a few thousand characters. The
code is the package's own. docs/log.md and docs/results/calibration.md compare both, with text that the model samples
itself, and that text alone.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from neuronmm.models.errors import UserError

PROSE, CODE = "prose", "code"
SHIPPED = (PROSE, CODE)
"""The words that name a shipped text where a calibration file is asked for."""

_CODE = ("compression", "engine", "measure", "models")  # packages of ordinary Python


def shipped_documents(word: str) -> list[str]:
    """Return the documents of a shipped text, ``prose`` or ``code``, in a fixed order.

    Raises:
        UserError: the package was installed without its sources.
    """
    if word == PROSE:
        files = [Path(__file__).with_name("prose.txt")]
    else:
        files = [file for package in _CODE for file in sorted(_folder(package).rglob("*.py"))]
    if not files:
        raise UserError(f"{word}: the package is installed without its sources; give a file of code instead")
    return [file.read_text(encoding="utf-8") for file in files]


def _folder(package: str) -> Path:
    found = find_spec(f"neuronmm.{package}")
    assert found is not None and found.submodule_search_locations, package
    return Path(found.submodule_search_locations[0])
