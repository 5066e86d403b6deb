"""This repository follows its own rules, and each rule reports a tree that breaks it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import house_rules as house

ROOT = Path(__file__).parent.parent
RULES = [
    house.op_problems,
    house.length_problems,
    house.docstring_problems,
    house.example_problems,
    house.link_problems,
    house.leftover_problems,
]
VALID = {
    "kernels/__init__.py": '"""Ops."""\n',
    "models/__init__.py": '"""Models."""\n',
    "kernels/ops.py": '"""Table."""\nfrom enum import Enum\n\nclass Op(str, Enum):\n    ADD = "add"\n',
    "kernels/hardware.py": '"""Figures."""\n',
    "kernels/reference.py": (
        '"""Reference."""\nfrom neuronmm.kernels.ops import Op, register\n\n'
        '@register(Op.ADD, "reference")\ndef add():\n    return 1\n'
    ),
    "models/patch.py": '"""Patch."""\nimport torch\nfrom neuronmm.kernels import ops\n',
    "emulator/timing.py": '"""Timing."""\nfrom neuronmm.kernels.hardware import CORE\n',
    "neuronmm/__init__.py": '"""Door."""\nfrom neuronmm.models.patch import patch\nfrom neuronmm.kernels import ops\n',
    "neuronmm/commands/compress.py": '"""compress\n\nexamples:\n  neuronmm compress A -o B\n"""\n',
    "tests/kernels/test_ops.py": "CASES = {Op.ADD: 1}\n",
    "pyproject.toml": '[project]\ndependencies = [\n    "torch>=2.5",\n    "pyyaml",\n]\n',
    "docs/guide.md": (
        "# 1. Models, and `more`\n\nModels live under `/models/`. [Up](#1-models-and-more)\n\n## Same\n\n## Same\n"
    ),
    "README.md": "The [guide](docs/guide.md), its [end](docs/guide.md#same-1), the [ops](kernels/ops.py).\n",
}


def plant(root: Path, tree: dict[str, str]) -> Path:
    """Write the files of ``tree`` under ``root``."""
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_this_repository_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    assert rule(ROOT) == []


def test_each_package_has_its_link_and_pyright_reads_it() -> None:
    packages = set(house.packages(ROOT)) - {"neuronmm"}
    assert packages == {path.name for path in (ROOT / "neuronmm").iterdir() if path.is_symlink()}
    settings = (ROOT / "pyproject.toml").read_text().partition("[tool.basedpyright]")[2].partition("\n[")[0]
    assert packages == set(re.findall(r'"neuronmm/(\w+)"', settings))


def test_the_checks_read_this_repository() -> None:
    seen = {path.relative_to(ROOT).parts[0] for path, _ in house.modules(ROOT)}
    assert seen == set(house.packages(ROOT)) >= {"neuronmm", "models", "kernels"}
    assert Path(__file__) in set(house.files(ROOT, {".py"}))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_valid_tree_has_no_problems(rule: Callable[[Path], list[str]], tmp_path: Path) -> None:
    assert rule(plant(tmp_path, VALID)) == []


def test_an_op_without_a_reference_or_a_test_is_reported(tmp_path: Path) -> None:
    ops = VALID["kernels/ops.py"] + '    MUL = "mul"\n'
    assert house.op_problems(plant(tmp_path, {**VALID, "kernels/ops.py": ops})) == [
        "kernels: Op.MUL has no implementation named 'reference'",
        "kernels: Op.MUL is in no test of tests/kernels",
    ]


@pytest.mark.parametrize("name", ["models/long.py", "kernels/cpu/long.cpp", "tests/test_long.py", "scripts/long.sh"])
def test_a_long_file_is_reported(name: str, tmp_path: Path) -> None:
    plant(tmp_path, {**VALID, name: "\n" * 400, "docs/long.md": "\n" * 999, ".venv/long.py": "\n" * 999})
    assert house.length_problems(tmp_path) == []
    plant(tmp_path, {name: "\n" * 401})
    assert house.length_problems(tmp_path) == [f"{name}: 401 lines, more than 400"]


def test_a_silent_module_and_a_command_without_example_are_reported(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {**VALID, "models/a.py": "x = 1\n", "neuronmm/commands/fry.py": '"""fry\n\n  neuronmm frying A\n"""\n'},
    )
    assert house.docstring_problems(tmp_path) == [
        "models/a.py: no module docstring",
        "neuronmm/commands/fry.py: the docstring shows no example of `neuronmm fry`",
    ]


@pytest.mark.parametrize(
    "target", ["docs/absent.md", "guide.md", "docs/guide.md#absent", "docs/guide.md#same-2", "#models", "kernels/no.py"]
)
def test_a_link_that_leads_nowhere_is_reported(target: str, tmp_path: Path) -> None:
    plant(
        tmp_path,
        {**VALID, "README.md": f"# The `x`\n\n[a\nb]({target}) [c](#the-x) [d](https://example.org/{target})\n"},
    )
    assert house.link_problems(tmp_path) == [f"README.md: the link to {target} leads nowhere"]


@pytest.mark.parametrize(
    "target", ["[a](b.md)", "`[a](b.md)`", "```\n[a](b.md)\n```", "- x\n  ```\n  [a](b.md)\n  ```"]
)
def test_a_link_in_code_is_no_link(target: str, tmp_path: Path) -> None:
    plant(tmp_path, {"docs/a.md": f"{target}\n\nEnd\n"})
    assert len(house.link_problems(tmp_path)) == (target == "[a](b.md)")


@pytest.mark.parametrize("line", ["@settings(max_examples=9)\ndef test_it(): ...", "QUICK = settings(max_examples=9)"])
def test_a_fixed_number_of_examples_is_reported(line: str, tmp_path: Path) -> None:
    plant(tmp_path, {**VALID, "tests/test_a.py": f"from hypothesis import settings\n{line}\n"})
    (problem,) = house.example_problems(tmp_path)
    assert problem.startswith("tests/test_a.py: settings(...)")


@pytest.mark.parametrize(
    "line", ["# TO" + "DO: later", "x = 1  # FIX" + "ME", 'P = "/' + 'work/x"', "see /" + "root/x"]
)
def test_a_leftover_is_reported(line: str, tmp_path: Path) -> None:
    plant(tmp_path, {**VALID, "models/a.py": f'"""Doc."""\n{line}\n'})
    (problem,) = house.leftover_problems(tmp_path)
    assert problem.startswith("models/a.py:2: leftover")
