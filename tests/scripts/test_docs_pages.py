"""The made pages of the documentation's site: links, sections, and the command line as its parser knows it."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import neuronmm
from neuronmm.cli import COMMANDS


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return import_module("docs_pages")


@pytest.mark.parametrize(
    ("source", "page", "link", "there"),
    [
        ("README.md", "index.md", "[a](docs/cpu.md#how)", "[a](cpu.md#how)"),
        ("README.md", "index.md", "[a](#limits)", "[a](#limits)"),
        ("README.md", "results/index.md", "[a](#two-commands)", "[a](../index.md#two-commands)"),
        ("README.md", "results/index.md", "[a](docs/results/cpu.md)", "[a](cpu.md)"),
        ("README.md", "index.md", "[a](docs/quickstart.ipynb)", "[a](quickstart.md)"),
        ("docs/compress.md", "compress.md", "[a](../configs)", "[a](recipes.md)"),
        ("docs/results/cpu.md", "results/cpu.md", "[a\nb](../../CONTRIBUTING.md#x)", "[a\nb](../contributing.md#x)"),
        ("docs/nki.md", "nki.md", "[`a`](../kernels/factors.py)", "`a`"),
        ("docs/nki.md", "nki.md", "![a](results/a.png) [b](https://b.example/c)", None),
    ],
)
def test_links_lead_to_pages(source: str, page: str, link: str, there: str | None, script: ModuleType) -> None:
    assert script.relinked(link, source, page) == (link if there is None else there)


def test_a_section_ends_before_the_next(script: ModuleType) -> None:
    readme = "# A\n\n## B\n\nb\n\n### C\n\nc\n\n## D\n\nd\n"
    assert script.section(readme, "B") == "# B\n\nb\n\n### C\n\nc\n"


def test_roles_are_dropped_from_docstrings(script: ModuleType) -> None:
    assert (
        script.on_page_content("a :class:<code>.B</code> :meth:<code>c</code>:") == "a <code>B</code> <code>c</code>:"
    )


def test_every_command_and_visible_option_is_listed(script: ModuleType) -> None:
    _, *parts = re.split(r"^## neuronmm (\w+)$", script.commands(), flags=re.MULTILINE)
    assert parts[::2] == list(COMMANDS)
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        assert "- `--debug`:" in part and re.search(rf"```sh\nneuronmm {name}\b", part)
        assert "<" not in re.sub(r"`[^`]+`|```.*?```", "", part, flags=re.DOTALL)  # it would be read as HTML
    compress = parts[1]
    assert "- `--budget NATS|faithful|balanced`: " in compress and "- `-o, --out OUT`: " in compress
    assert "--share " not in compress and "--help`" not in compress


def test_verbs_and_recipes_are_complete(script: ModuleType) -> None:
    assert all(f"::: {module}.{name}\n" in script.api() for name, module in neuronmm._MODULES.items())
    assert "## default.yaml" in script.recipes() and "method: fisher" in script.recipes()


def test_the_readme_gives_three_pages(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "notebook", lambda: "# Quick start\n")
    made = script.pages()
    assert made["limits.md"].startswith("# Limits\n\n- Nothing here has run on Trainium.")
    assert "](quality.md)" in made["results/index.md"] and "](results/quality.md)" in made["index.md"]
    assert all(text.startswith("# ") for text in made.values())
