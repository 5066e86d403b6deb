"""The doctor: it names what is missing and what to do, and notices kernels that are wrong or cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from neuronmm.cli import main
from neuronmm.kernels.cpu import library
from neuronmm.measure import diagnosis, trial
from neuronmm.measure.diagnosis import Finding, diagnose


def findings() -> dict[str, Finding]:
    return {finding.what: finding for finding in diagnose().findings}


def test_a_machine_on_which_generation_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert "generation works; --backend auto chooses" in out and torch.__version__ in out and err == ""
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["works"] is True and document["problem"] is None
    assert document["backend"] == ("cuda" if torch.cuda.is_available() else "cpu")
    if library.core() is not None and document["backend"] == "cpu":
        assert f"whole step in C++ ({library.isa()})" in document["kernels"]


def test_wrong_logits_are_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = trial._logits

    def wrong(runner: trial.TorchRunner) -> torch.Tensor:
        return right(runner) * (1 if runner.impl == "reference" else 1.01)

    monkeypatch.setattr(trial, "_logits", wrong)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert "generation works" not in out and err.count("\n") == 1
    assert err.startswith("neuronmm doctor: generation does not work here: RuntimeError: the logits differ")


def test_a_missing_core_is_named_and_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    library.core.cache_clear()
    monkeypatch.setattr(library, "_matches", lambda core: False)
    try:
        found = diagnose()
        rows = {finding.what: finding for finding in found.findings}
    finally:
        library.core.cache_clear()
    assert "compiler" in str(rows["C++ core"].advice) and found.problem is None
    assert "C++" not in str(found.kernels) or found.backend == "cuda"


def test_packages_that_are_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "requires", lambda name: ["torch>=999", "no-such-thing>=1", "x>=1; extra == 'dev'"])
    rows = findings()
    assert rows["torch"].found == f"{torch.__version__}, but neuronmm needs >=999"
    assert rows["no-such-thing"] == Finding("no-such-thing", "missing", "pip install 'no-such-thing>=1'")
    assert "x" not in rows


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert findings()["C++ compiler"].found == "no no-such-compiler"


def test_a_cache_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path / "a" / "b"))
    assert findings()["cache folder"].advice is None
    monkeypatch.setattr(diagnosis.os, "access", lambda path, mode: False)
    assert "NEURONMM_CACHE" in str(findings()["cache folder"].advice)
    assert list(tmp_path.iterdir()) == []


def test_torch_that_cannot_be_imported_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is broken')\n")
    command = [sys.executable, "-m", "neuronmm", "doctor"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1 and "packages" in done.stdout and "the check failed" in done.stdout
    assert done.stderr.count("\n") == 1 and "libtorch is broken" in done.stderr
