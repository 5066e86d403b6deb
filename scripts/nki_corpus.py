"""Run public NKI kernels, unchanged, under the emulator and report their outcomes as Markdown.

Takes checkouts of aws-neuron-sdk, nki-samples, nki-library or nki-moe and recognises each by its files. In every
checkout the script runs the documentation's tests (``nki/test``) and the kernels of ``nki_corpus_cases.py``, compares
their values with NumPy in float64, counts the functions of ``nki/api`` that the emulator has, and lists the names that
files with kernels use and the emulator lacks. It copies nothing from a checkout.

  python scripts/nki_corpus.py CHECKOUT [CHECKOUT ...] [--output docs/results/nki_corpus.md]
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import re
import subprocess
import sys
import textwrap
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from nki_corpus_cases import CASES, Case
from rich.progress import track

from neuronmm.emulator.importable import importable
from neuronmm.emulator.nki import nki_modules, run
from neuronmm.emulator.nki.modules import surface
from neuronmm.emulator.nki.run import Kernel
from neuronmm.kernels.hardware import TRN1, TRN2

HOSTS: dict[str, dict[str, Any]] = {
    "torch_neuronx": {},
    "torch_xla": {},
    "torch_xla.core": {},
    "torch_xla.core.xla_model": {},
    "loguru": {"logger": None},
    "scipy": {},
    "scipy.special": {"softmax": None},
}
"""Modules that tutorials import for their own measurements and references, replaced by empty ones."""
NAME = re.compile(r"\b(nl|nisa)\.([A-Za-z_]\w*)")
TITLE = "# Public NKI kernels under the emulator"
REPEAT = """\
## How to repeat it

    python scripts/nki_corpus.py CHECKOUT [CHECKOUT ...] --output docs/results/nki_corpus.md

# Appendix

The files are those of the checkouts, unchanged. Values are compared with NumPy in float64: *agrees* gives the largest
difference over the largest element.
"""


@contextlib.contextmanager
def load_module(file: Path) -> Iterator[ModuleType]:
    """Import a file that may import its neighbours; on exit, forget all of them."""
    before = dict(sys.modules)
    sys.path.insert(0, str(file.parent))
    try:
        with importable(HOSTS), nki_modules(), contextlib.redirect_stdout(io.StringIO()):
            spec = importlib.util.spec_from_file_location(file.stem, file)
            assert spec is not None and spec.loader is not None
            module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            yield module
    finally:
        sys.path.remove(str(file.parent))
        for name in set(sys.modules) - set(before):
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(file.parent)):
                del sys.modules[name]


def reason(error: BaseException, root: Path) -> str:
    """Return in one line why a kernel did not run, without the paths of this machine."""
    missing = re.search(r"has no attribute '(\w+)'", str(error)) or re.search(r"import name '(\w+)'", str(error))
    if missing:
        return f"`{missing[1]}` is not supported"
    text = f"{type(error).__name__}: {error}" if type(error).__name__ != "NkiError" else str(error)
    return text.replace(str(root) + "/", "").splitlines()[0].replace("|", "\\|")[:200]


def is_second_dialect(file: Path) -> bool:
    """Return whether a file is in the second dialect."""
    return "neuronxcc" not in file.read_text(errors="replace")


def outcome(case: Case, module: ModuleType, file: Path) -> str:
    """Run a case and return its outcome."""
    arguments, expected = case.make()
    kernel = getattr(module, case.kernel)
    if case.grid:
        kernel = kernel[case.grid]
    if isinstance(kernel, Kernel) or case.bare:
        results = run(kernel, *arguments, core=TRN2 if is_second_dialect(file) else TRN1).outputs
    else:
        results = kernel(*arguments)
    actual = np.asarray(results[0] if isinstance(results, tuple) else results).astype(np.float64)
    if actual.shape != expected.shape:
        return f"**wrong shape** {actual.shape}, not {expected.shape}"
    error = float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))
    return f"agrees, {error:.1e}" if error <= case.tolerance else f"**wrong values**, {error:.1e}"


def kernel_outcomes(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield file, kernel and outcome of every listed kernel that the checkout has."""
    candidates = [(file, case) for case in CASES for file in sorted(root.rglob(case.file))]
    for file, case in track(candidates, f"{root.name}: kernels", disable=not sys.stderr.isatty()):
        if not re.search(rf"^def {case.kernel}\b", file.read_text(), re.M):
            continue
        try:
            with load_module(file) as module:
                result = outcome(case, module, file)
        except Exception as error:
            result = f"refused: {reason(error, root)}"
        yield str(file.relative_to(root)), case.kernel, result


def test_outcomes(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield file, test and outcome of the documentation's tests."""
    files = sorted(root.glob("nki/test/test_*.py"))
    for file in track(files, f"{root.name}: tests", disable=not sys.stderr.isatty()):
        try:
            with load_module(file) as module:
                suites: Any = unittest.defaultTestLoader.loadTestsFromModule(module)
                for suite in suites:
                    for test in suite:
                        yield file.name, test.id().rpartition(".")[2], verdict(test, root)
        except Exception as error:
            yield file.name, "(the whole file)", f"refused: {reason(error, root)}"


class Result(unittest.TestResult):
    """A test result that keeps the exception itself."""

    raised: BaseException | None = None

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self.raised = err[1]

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self.raised = err[1]


def verdict(test: Any, root: Path) -> str:
    """Run one test and return its outcome."""
    result = Result()
    test.run(result)
    if result.raised is None:
        if result.skipped:
            return f"skipped: {result.skipped[0][1]}"
        return "passes" if result.wasSuccessful() else "**fails**"  # a part of a test fails without raising
    return "**fails**" if result.failures else f"refused: {reason(result.raised, root)}"


def coverage(root: Path) -> Iterator[str]:
    """Yield, per documented module, how many functions the emulator has and the names of the others."""
    for part in ("language", "isa"):
        stub = root / "nki" / "api" / "nki" / part / "__init__.py"
        if not stub.exists():
            continue
        defined = [n.name for n in ast.parse(stub.read_text()).body if isinstance(n, ast.FunctionDef)]
        dialect = "neuronxcc.nki" if (root / "nki" / "api" / "nki" / "compiler").exists() else "nki"
        supported = surface(dialect.split(".")[0])[f"{dialect}.{part}"]
        missing = sorted(name for name in defined if name not in supported)
        yield f"`{dialect}.{part}`: {len(defined) - len(missing)} of {len(defined)} functions. Not supported: " + (
            ", ".join(f"`{name}`" for name in missing) or "none"
        )


def usage(root: Path) -> tuple[int, int, Counter[str]]:
    """Count the files with kernels, those that use only supported names, and the files per unsupported name."""
    files = supported_files = 0
    unsupported: Counter[str] = Counter()
    names = {d: surface(d) for d in ("neuronxcc", "nki")}
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(errors="replace")
        if "nki/api" in str(file) or not re.search(r"^(import|from) (neuronxcc\.)?nki\b", text, re.M):
            continue
        if not re.search(r"\bnisa\.|\bnl\.(load|store|ndarray)\b", text):
            continue
        dialect, prefix = ("nki", "nki") if is_second_dialect(file) else ("neuronxcc", "neuronxcc.nki")
        parts = {"nl": names[dialect][f"{prefix}.language"], "nisa": names[dialect][f"{prefix}.isa"]}
        missing = {f"{alias}.{name}" for alias, name in NAME.findall(text) if name not in parts[alias]}
        files, supported_files = files + 1, supported_files + (not missing)
        unsupported.update(sorted(missing))  # sorted: names with equal counts keep their order between runs
    return files, supported_files, unsupported


def table(head: str, rows: list[tuple[str, str, str]]) -> Iterator[str]:
    """Yield a Markdown table of outcomes; ``head`` names the first two columns."""
    yield f"| {head} | outcome |"
    yield "|---|---|---|"
    yield from (f"| {a} | {b} | {c} |" for a, b, c in rows)
    yield ""


class Report(NamedTuple):
    """One checkout: its name, the outcomes of kernels and tests, the files with kernels, and the report's lines."""

    name: str
    kernels: list[str]
    tests: list[str]
    files: str
    lines: list[str]


def report(root: Path) -> Report:
    """Run everything in one checkout."""
    commit = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    lines = [f"## {root.name}, at {commit.stdout.strip() or 'an unknown commit'}", ""]
    for line in coverage(root):
        lines += [*textwrap.wrap(line, 120), ""]
    kernels, tests = list(kernel_outcomes(root)), list(test_outcomes(root))
    kernel_results, test_results = [row[2] for row in kernels], [row[2] for row in tests]
    if kernels:
        lines += [f"{share(kernel_results, 'agrees')} kernels run unchanged with right values.", ""]
        lines += table("file | kernel", kernels)
    if tests:
        lines += [f"{share(test_results, 'passes')} entries of the documentation's tests pass.", ""]
        lines += table("file | test", tests)
    files, supported_files, unsupported = usage(root)
    if files:
        lines += [
            f"{supported_files} of {files} files with kernels use only names that the emulator has. The others use:"
        ]
        names = ", ".join(f"`{name}` {count}" for name, count in unsupported.most_common())
        lines += [*textwrap.wrap(names or "nothing", 120), ""]
    return Report(root.name, kernel_results, test_results, f"{supported_files} of {files}" if files else "", lines)


def share(results: list[str], word: str) -> str:
    """Return how many results contain the word: "24 of 28"; empty without results."""
    return f"{sum(word in result for result in results)} of {len(results)}" if results else ""


def document(reports: list[Report]) -> Iterator[str]:
    """Yield the verdict, its table, a bar chart of the kernels, the command, and the reports as an appendix."""
    kernels = [result for part in reports for result in part.kernels]
    tests = [result for part in reports for result in part.tests]
    wrong, failed = (sum("**" in result for result in results) for results in (kernels, tests))
    yield TITLE
    yield ""
    agreeing, passing = share(kernels, "agrees") or "No", share(tests, "passes") or "No"
    yield f"{agreeing} public kernels run unchanged and agree with NumPy; {wrong or 'none'} give wrong values."
    yield f"{passing} entries of the documentation's tests pass; {failed or 'none'} fail."
    yield "The emulator refuses the others and gives the reason; no Trainium device was used."
    yield ""
    yield "| checkout | kernels that agree | tests that pass | files with supported names only |"
    yield "|---|---:|---:|---:|"
    for part in reports:
        cells = share(part.kernels, "agrees"), share(part.tests, "passes"), part.files
        yield f"| {part.name} | {' | '.join(cells)} |"
    yield ""
    yield "Kernels per checkout, `#` those that agree, `.` the others:"
    yield ""
    yield "```"
    for part in reports:
        good = sum("agrees" in result for result in part.kernels)
        if part.kernels:
            yield f"{part.name:24} {'#' * good}{'.' * (len(part.kernels) - good)}"
    yield "```"
    yield ""
    yield REPEAT
    for part in reports:
        yield from part.lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    for root in options.checkout:
        if not root.is_dir():
            parser.error(f"{root} is not a folder: name a checkout made with git clone")
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    text = "\n".join(document([report(root.resolve()) for root in options.checkout]))
    if options.output:
        options.output.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
