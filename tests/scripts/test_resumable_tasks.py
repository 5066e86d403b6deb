"""The tasks of a study that resumes: what is taken over, and what is computed again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
NAMES = ("first", "second")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import resumable_tasks

    monkeypatch.setattr(resumable_tasks, "ROOT", tmp_path)
    (tmp_path / "source.py").write_text("1")
    return resumable_tasks


def count(folder: Path, name: str) -> int:
    """Return how often ``name`` has been computed, this time included; fail where a file says so."""
    if (folder / f"{name}.fails").exists():
        raise ValueError(name)
    calls = folder / f"{name}.calls"
    with calls.open("a") as file:
        file.write("x")
    return len(calls.read_text())


def test_a_run_goes_on_where_the_last_one_failed(script: ModuleType, tmp_path: Path) -> None:
    one, state = partial(count, tmp_path), tmp_path / "out" / "state.json"
    (tmp_path / "second.fails").touch()
    with pytest.raises(ValueError, match="second"):
        script.compute(NAMES, one, sources=["*.py"], state=state, jobs=1)
    (tmp_path / "second.fails").unlink()
    assert script.compute(NAMES, one, sources=["*.py"], state=state, jobs=1) == {"first": 1, "second": 1}


def test_other_sources_start_anew(script: ModuleType, tmp_path: Path) -> None:
    one, state = partial(count, tmp_path), tmp_path / "state.json"
    for sources, times in (("1", 1), ("1", 1), ("2", 2)):
        (tmp_path / "source.py").write_text(sources)
        found = script.compute(NAMES, one, sources=["*.py"], state=state, jobs=2)
        assert found == {"first": times, "second": times}
