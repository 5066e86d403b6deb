"""The documents' code runs: the blocks of docs/models.md, the quick start's notebook, the docstrings' examples."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from documents import DOCS, blocks
from house_rules import files, packages
from neuronmm.models.spec import CompressionSpec, PivotedForm
from tiny_models import make_tiny, tiny_checkpoint
from word_tokenizer import word_tokenizer

ROOT = DOCS.parent


def test_the_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_checkpoint(tmp_path / "out" / "smollm2-low")
    word_tokenizer().save_pretrained(tmp_path / "out" / "smollm2-low")
    code = blocks("models.md", "python")
    assert len(code) >= 5
    namespace: dict[str, Any] = {}
    for number, block in enumerate(code, 1):
        exec(compile(block, f"models.md, block {number}", "exec"), namespace)
    out = capsys.readouterr().out
    assert "LowRankLinear(" in out and "mlp.gate_proj has rank 12; asked ratio 0.2" in out


def test_the_quick_start_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the cell of the parameters is replaced, by a tiny model and settings of a second."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    make_tiny(head_dim=8).save_pretrained(tmp_path / "dense")
    word_tokenizer().save_pretrained(tmp_path / "dense")
    notebook = nbformat.read(DOCS / "quickstart.ipynb", as_version=4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    settings = {"ratio": 0.3, "targets": "all", "refine": "off", "calibration_rows": 4, "calibration_length": 16}
    settings["calibration"] = "self"  # in prose the tiny tokenizer knows no word
    parameters.source = f"from pathlib import Path\nmodel = {str(tmp_path / 'dense')!r}\nsettings = {settings}"
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}, timeout=600).execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "nats per token" in printed and "predicted TPOT" in printed and "LowRankSwiGLU(" in printed


def test_the_quick_start_keeps_its_outputs_and_names_no_folder_of_a_user() -> None:
    text = (DOCS / "quickstart.ipynb").read_text()
    notebook = nbformat.reads(text, as_version=4)
    assert all(cell.outputs for cell in notebook.cells if cell.cell_type == "code" and "print(" in cell.source)
    assert "/home/" not in text and "site-packages" not in text


EXAMPLES = [
    f"neuronmm.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}"
    for folder in packages(ROOT)
    for path in files(ROOT / folder, {".py"})
    if re.search(r"^ +>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_a_module_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in a folder with the dense model ``llama`` and its compressed form ``llama-low``.

    ``pytest --doctest-modules`` would import the folders under their bare names, and would not know the fixtures.
    """
    monkeypatch.chdir(tmp_path)
    make_tiny().save_pretrained(tmp_path / "llama")
    tiny_checkpoint(tmp_path / "llama-low")
    for folder in ("llama", "llama-low"):
        word_tokenizer().save_pretrained(tmp_path / folder)
    found = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0 and found.failed == 0


def test_the_modules_with_examples_are_found() -> None:
    """The verbs that a user of the Python API looks at first."""
    names = {"compression.pipeline", "engine.engine", "models.patch"}
    assert {f"neuronmm.{name}" for name in names} <= set(EXAMPLES)


def test_the_format_specification_has_every_field() -> None:
    text = (DOCS / "format.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    required = {row[0].strip("| `"): row[2] for row in rows if row[2:] and row[2] in ("yes", "no")}
    assert required == {
        name: "yes" if field.is_required() else "no" for name, field in CompressionSpec.model_fields.items()
    }
    assert all(f'"{name}":' in text for name in PivotedForm.model_fields)
