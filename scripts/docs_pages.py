"""The pages of the documentation's site that are made from something else: a hook of mkdocs, run by ``make docs``.

The README is the first page, and its sections about results and limits are pages of their own. The quick start is the
notebook. Recipes, command line and Python API come from the files, the parser and the docstrings. Links are those of
the repository, as GitHub follows them; here they are turned into links between the pages.
"""

from __future__ import annotations

import argparse
import os
import re
from html import escape
from pathlib import Path, PurePosixPath
from typing import Any

import neuronmm
from neuronmm.cli import COMMANDS, parser

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "configs": "recipes.md",
    "docs/quickstart.ipynb": "quickstart.md",
}
"""Path in the repository -> the page that shows it. The others are the files under docs/."""

CLASSES = {
    "Settings": (
        "neuronmm.compression.config.CompressionConfig",
        "neuronmm.measure.config.BenchmarkConfig",
        "neuronmm.measure.config.EvaluationConfig",
        "neuronmm.measure.config.PredictionConfig",
    ),
    "Generation": (
        "neuronmm.engine.engine.Engine",
        "neuronmm.engine.engine.Stream",
        "neuronmm.engine.sampling.SamplingParams",
        "neuronmm.engine.loop.Generation",
    ),
    "Models and errors": (
        "neuronmm.models.spec.CompressionSpec",
        "neuronmm.models.lowrank.LowRankLinear",
        "neuronmm.models.lowrank.LowRankSwiGLU",
        "neuronmm.models.errors.UserError",
    ),
}
"""What the Python API has beside the verbs of ``import neuronmm``, by heading."""


def on_files(files: Any, config: Any) -> Any:
    """Add the made pages to mkdocs' files; the notebook's page replaces the notebook."""
    from mkdocs.structure.files import File

    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    files.remove(files.get_file_from_path("quickstart.ipynb"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a file under docs/ into links between pages; the made pages have theirs already."""
    own = page.file.generated_by is None
    return relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri) if own else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Drop the roles, such as ``:class:``, that docstrings put before names."""
    return re.sub(r":(?:class|func|meth|mod|attr|data):<code>[.~]?", "<code>", html)


def pages() -> dict[str, str]:
    """Return the Markdown of every made page, by its path on the site."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return {
        "index.md": relinked(readme, "README.md", "index.md"),
        "contributing.md": relinked(contributing, "CONTRIBUTING.md", "contributing.md"),
        "results/index.md": relinked(section(readme, "Results"), "README.md", "results/index.md"),
        "limits.md": relinked(section(readme, "Limits"), "README.md", "limits.md"),
        "quickstart.md": relinked(notebook(), "docs/quickstart.ipynb", "quickstart.md"),
        "recipes.md": recipes(),
        "commands.md": commands(),
        "api.md": api(),
    }


def relinked(markdown: str, source: str, page: str) -> str:
    """Return ``markdown`` of the repository's file ``source`` with its links as ``page`` needs them.

    A link to a file that is on no page becomes plain text.
    """

    def relink(match: re.Match[str]) -> str:
        text, name, anchor = match[1], match[2], match[3] or ""
        folder = PurePosixPath(source).parent
        path = os.path.normpath(folder / name) if name else source
        target = PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if target is None:
            return text
        if target == page and name == "":
            return f"[{text}]({anchor})"
        return f"[{text}]({os.path.relpath(target, PurePosixPath(page).parent)}{anchor})"

    return re.sub(r"\[([^][]*)\]\((?!\w+:)([^()#\s]*)(#[^()\s]*)?\)", relink, markdown)


def section(readme: str, title: str) -> str:
    """Return the section ``title`` of the README as a page."""
    _, _, rest = readme.partition(f"\n## {title}\n")
    return f"# {title}\n{rest.partition(chr(10) + '## ')[0]}"


def notebook() -> str:
    """Return the quick start as Markdown."""
    from nbconvert import MarkdownExporter

    text, _ = MarkdownExporter().from_filename(ROOT / "docs" / "quickstart.ipynb")
    return str(text)


def recipes() -> str:
    """Return the recipes of ``configs/``, each with its comments."""
    parts = [
        "# Recipes\n\nFiles for `neuronmm compress --recipe FILE`; options override them. They are in `configs/`.\n"
    ]
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        parts.append(f"## {file.name}\n\n```yaml\n{file.read_text(encoding='utf-8')}```\n")
    return "\n".join(parts)


def commands() -> str:
    """Return the command line as its parser knows it: arguments and examples of every command."""
    root = parser()
    (subparsers,) = (action for action in root._actions if isinstance(action, argparse._SubParsersAction))
    parts = ["# Command line\n"]
    for name in COMMANDS:
        command = subparsers.choices[name]
        formatter = command._get_formatter()
        details, _, examples = (command.epilog or "").partition("examples:\n")
        summary, details = (escape(text.strip(), quote=False) for text in (str(command.description), details))
        parts.append(f"## neuronmm {name}\n\n{summary[0].upper()}{summary[1:]}.\n\n{details}\n")
        for action in command._actions:
            if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
                value = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
                words = " ".join(filter(None, [", ".join(action.option_strings), value]))
                meaning = escape(formatter._expand_help(action) if action.help else "", quote=False)
                parts.append(f"- `{words}`: {meaning}")
        lines = "\n".join(line.removeprefix("  ") for line in examples.rstrip().splitlines())
        parts.append(f"\n```sh\n{lines}\n```\n")
    return "\n".join(parts)


def api() -> str:
    """Return directives for mkdocstrings: the verbs of ``import neuronmm``, then what they take and give."""
    verbs = [f"::: {module}.{name}" for name, module in neuronmm._MODULES.items()]
    parts = ["# Python API", "## The verbs of `import neuronmm`", *verbs]
    for heading, names in CLASSES.items():
        parts += [f"## {heading}", *(f"::: {name}" for name in names)]
    return "\n\n".join(parts) + "\n"
