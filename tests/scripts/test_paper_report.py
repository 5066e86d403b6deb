"""The text that scripts/paper_report.py writes around its figures, from invented results."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from neuronmm.emulator.nki import nki_modules
from neuronmm.emulator.timing import measured

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    sys.modules.pop("paper_report", None)
    with nki_modules():
        import paper_report

    return paper_report


def test_a_decode_goal_is_also_judged_with_the_bias_of_the_measured_decode(script: ModuleType) -> None:
    assert script.judged([0.969, 0.996], "trn1", -0.099) == "yes; with that bias 87.3% to 89.7%: **no**"
    assert script.judged([0.85, 0.996], "trn1", 0.0) == "**no**; with that bias 85.0% to 99.6%: **no**"
    assert script.judged([0.956], "trn3", -0.099) == "yes; no decode was measured there"


def test_stalls_are_priced(script: ModuleType) -> None:
    results: dict[str, Any] = {f"stall {name}": {"latency": 78.0857e-3, "mfu": 0.9209} for name in script.cases.STALLS}
    text = " ".join(" ".join(script.stalls(results)).split())
    assert "| matmuls of 512 columns | 393216 |" in text and "| cycles per matmul | 556 |" in text
    assert "| predicted, ms | 78.09 |" in text and "| of it the matmuls | 99.99% |" in text
    assert "| each 1 % of stalls costs, ms | 0.78 |" in text and "falls below 90 % | 2.3% |" in text
    assert all(f"| {name} | 78.09 | 92.1% |" in text for name in script.cases.STALLS)


def test_the_document_shows_the_published_context_encoding(script: ModuleType) -> None:
    rows = [
        {"kind": "latency", "case": "dense decode", "published": 10.42, "predicted": 9.39, "spills": False},
        {"kind": "ttft", "case": "dense context encoding", "published": 50.07, "predicted": 9.39, "spills": False},
    ]
    text = "\n".join(script.context({"validation": rows, "padded": {"32": 9.39, "512": 14.83}}))
    assert "| published | 50.07 |" in text and "padded to 512 tokens | 14.83 |" in text
    assert "can add to a step | 1.03 |" in text and "No predicted TTFT is validated" in text
    assert all(f"| {prompt - token:.2f} |" in text for prompt, token in measured.CONTEXT_REPORTS.values())
    (row,) = [line for line in script.validation([script.Row(**r) for r in rows] + sweep(script)) if "context" in line]
    assert "**not validated** | 50.07 | 9.39 | -81.2% |" in row


def sweep(script: ModuleType) -> list[Any]:
    """One row of each kind that the means need."""
    return [script.Row(kind, "NeuronMM, M = 1", 1.0, 1.0) for kind in ("latency", "traffic")]


def test_the_fit_leaves_out_a_kernel_not_a_size(script: ModuleType) -> None:
    left_out = [{"kernel": "NeuronMM", "begin": 0, "overhead": 0, "errors": (-0.151, -0.144, -0.146)}]
    text = "\n".join(script.fit(43, left_out))
    assert "| NeuronMM | 0 | 0 | -15.1% | -14.4% | -14.6% |" in text
    assert "One kernel, NeuronMM, determines the constant" in text
