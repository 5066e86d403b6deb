"""The rules of this repository, as functions from a source tree to the list of violations.

``test_house.py`` runs them on this repository and, to see them fail, on small artificial trees.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 400
CODE = {".py", ".cpp", ".h", ".sh", ".yaml"}
SKIPPED = re.compile(r"^(\..*|build|dist|out|__pycache__|.*\.egg-info)$")
LEFTOVERS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b|(^|[\s\"'`(=])/(work|root)/")


def packages(root: Path) -> list[str]:
    """Return the folders of ``root`` that install: ``neuronmm``, and the others as ``neuronmm.<folder>``."""
    return sorted(path.parent.name for path in root.glob("*/__init__.py"))


def files(root: Path, suffixes: set[str]) -> Iterator[Path]:
    """Yield every file of ``root`` with one of the suffixes, without environments, caches and build results."""
    for path in sorted(root.iterdir()):
        if SKIPPED.match(path.name) and path.name != ".ci":
            continue
        if path.is_symlink():  # the links in neuronmm/ lead to folders of the root
            continue
        if path.is_dir():
            yield from files(path, suffixes)
        elif path.suffix in suffixes:
            yield path


def modules(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yield every Python file that installs, with its syntax tree."""
    for folder in packages(root):
        for path in files(root / folder, {".py"}):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def op_problems(root: Path) -> list[str]:
    """Report ops without a reference implementation, and ops that no kernel test names."""
    ops: dict[str, int] = {}
    referenced: set[str] = set()
    for path in files(root / "kernels", {".py"}):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name == "Op":
                ops |= {ast.unparse(a.targets[0]): a.lineno for a in node.body if isinstance(a, ast.Assign)}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "register" and len(node.args) == 2:
                op, name = (ast.unparse(argument) for argument in node.args)
                if name == "'reference'":
                    referenced.add(op.removeprefix("Op."))
    tests = "".join(path.read_text(encoding="utf-8") for path in files(root / "tests" / "kernels", {".py"}))
    problems = [f"kernels: Op.{op} has no implementation named 'reference'" for op in ops if op not in referenced]
    problems += [
        f"kernels: Op.{op} is in no test of tests/kernels" for op in ops if not re.search(rf"\bOp\.{op}\b", tests)
    ]
    return problems if ops else ["kernels: no class Op"]


def length_problems(root: Path) -> list[str]:
    """Report code files of more than MAX_LINES lines."""
    counts = ((path, len(path.read_text(encoding="utf-8").splitlines())) for path in files(root, CODE))
    return [f"{path.relative_to(root)}: {n} lines, more than {MAX_LINES}" for path, n in counts if n > MAX_LINES]


def docstring_problems(root: Path) -> list[str]:
    """Report modules without a docstring, and commands whose help shows no example."""
    problems = []
    for path, tree in modules(root):
        where, text = path.relative_to(root), ast.get_docstring(tree) or ""
        if not text and tree.body:
            problems.append(f"{where}: no module docstring")
        is_command = where.parts[:2] == ("neuronmm", "commands") and path.stem != "__init__"
        if is_command and not re.search(rf"^\s+neuronmm {path.stem}\b", text, re.MULTILINE):
            problems.append(f"{where}: the docstring shows no example of `neuronmm {path.stem}`")
    return problems


def example_problems(root: Path) -> list[str]:
    """Report properties with a fixed number of examples, which `make test-random` could not raise."""
    paths = (path for path in files(root / "tests", {".py"}) if path.name != "draws.py")
    fixed = re.compile(r"^\s*(@|\w+ = )settings\(", re.MULTILINE)
    return [
        f"{path.relative_to(root)}: settings(...) of hypothesis; say draws.examples(few)"
        for path in paths
        if fixed.search(path.read_text(encoding="utf-8"))
    ]


def link_problems(root: Path) -> list[str]:
    """Report links of the documents to a file or a heading that does not exist; web addresses are not checked."""
    problems = []
    for path in files(root, {".md"}):
        for target in re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`\n]*`", "", _without_blocks(path))):
            name, _, anchor = target.partition("#")
            document = path.parent / name if name else path
            if re.match(r"https?://", target) or (document.exists() and (not anchor or anchor in _anchors(document))):
                continue
            problems.append(f"{path.relative_to(root)}: the link to {target} leads nowhere")
    return problems


def _without_blocks(document: Path) -> str:
    """Return the text of a document without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def _anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a document."""
    anchors: list[str] = []
    for heading in re.findall(r"^#+ +(.*)$", _without_blocks(document), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        repeated = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", earlier) is not None for earlier in anchors)
        anchors.append(f"{anchor}-{repeated}" if repeated else anchor)
    return set(anchors)


def leftover_problems(root: Path) -> list[str]:
    """Report notes to oneself and paths of one machine, in code and documents."""
    problems = []
    for path in files(root, CODE | {".md", ".toml"}):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if LEFTOVERS.search(line):
                problems.append(f"{path.relative_to(root)}:{number}: leftover: {line.strip()[:80]}")
    return problems
