"""The benchmark of the forms: its table, and the JSON line after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core_decoding import needs_core

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


@needs_core
def test_the_last_line_holds_the_machine_and_every_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_forms

    monkeypatch.setattr(bench_forms, "MODELS", {"tiny": bench_forms.Model(32, 48, 2, (12, 8), (14, 10))})
    options = ["--rounds", "2", "--steps", "1", "--prompt", "9", "--threads", "1"]
    monkeypatch.setattr("sys.argv", ["bench_forms.py", *options])
    bench_forms.main()
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 2 * len(bench_forms.VARIANTS)
    result = json.loads(last)
    assert result["machine"]["cores"] and result["threads"] == 1
    assert set(result["ms"]["tiny"]) == {"decode", "prefill"}
    assert all(len(rounds) == 2 for phase in result["ms"]["tiny"].values() for rounds in phase.values())
