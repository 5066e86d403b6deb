"""The cache on disk: documents and folders appear completely or not at all; and the tiling solver's use of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from neuronmm.kernels import cache
from neuronmm.kernels.hardware import TRN1, TRN2
from neuronmm.kernels.nki import tiling
from neuronmm.kernels.nki.problem import FP8, MlpProblem, Pivots, Problem
from neuronmm.kernels.nki.tiling import solve
from neuronmm.kernels.ops import Form

LINEAR = Problem(200, 576, 128, 300)
MLP = MlpProblem(200, 576, 1536, 128, 128, 128)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, whose folder does not exist yet."""
    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path / "cache"))
    solve.cache_clear()
    return tmp_path / "cache"


def documents(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def no_search(*_: Any) -> Any:
    raise AssertionError("the solver searched, though the choice was cached")


def test_a_document_is_read_back_and_no_other_file_remains(folder: Path) -> None:
    assert cache.read("a/b.json") is None
    cache.write("a/b.json", {"x": [1, 2.5, "y"]})
    cache.write("a/b.json", {"x": [3]})
    assert cache.read("a/b.json") == {"x": [3]}
    with pytest.raises(TypeError):
        cache.write("a/b.json", {"x": {4}})  # a set is no JSON
    assert cache.read("a/b.json") == {"x": [3]}
    assert documents(folder) == [folder / "a" / "b.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: text[: len(text) // 2],
        lambda text: b"[]",
        lambda text: b"1",
        lambda text: b"\xff\xfe",
        lambda text: text.replace(b"256", b"257"),
        lambda text: text.replace(b"blocks", b"others"),
    ],
)
def test_a_damaged_document_counts_as_missing(folder: Path, damage: Any) -> None:
    cache.write("x.json", {"blocks": 256})
    content = (folder / "x.json").read_bytes()
    assert damage(content) != content
    (folder / "x.json").write_bytes(damage(content))
    assert cache.read("x.json") is None


def test_the_solver_works_without_a_writable_folder(folder: Path) -> None:
    folder.write_text("a file")
    cache.write("a/b.json", 1)
    assert cache.read("a/b.json") is None
    assert solve(LINEAR).blocks == tiling.search(LINEAR, TRN1).blocks


def test_readers_see_complete_documents_while_processes_write(folder: Path) -> None:
    script = "import runpy, sys\nwrite = runpy.run_path(sys.argv[1])['write']\n"
    script += "for _ in range(20):\n    write('x.json', [int(sys.argv[2])] * 20000)"
    cache.write("x.json", [0] * 20_000)
    writers = [subprocess.Popen([sys.executable, "-c", script, cache.__file__, str(number)]) for number in (1, 2)]
    seen: set[int] = set()
    while any(writer.poll() is None for writer in writers):
        document = cache.read("x.json")
        assert document is not None and len(document) == 20_000 and len(set(document)) == 1
        seen.add(document[0])
    assert [writer.wait() for writer in writers] == [0, 0] and len(seen) > 1
    assert documents(folder) == [folder / "x.json"]


def test_a_folder_appears_completely_or_not_at_all(folder: Path) -> None:
    def fill(inside: Path, *, fail: bool = False, other: bool = False) -> None:
        assert not (folder / "model").exists()
        (inside / "a").write_text("ours")
        if other:  # another process completes the same folder while this one writes
            (folder / "model").mkdir()
            (folder / "model" / "a").write_text("theirs")
        if fail:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cache.write_folder(folder / "model", lambda inside: fill(inside, fail=True))
    assert list(folder.iterdir()) == []
    cache.write_folder(folder / "model", lambda inside: fill(inside, other=True))
    assert documents(folder) == [folder / "model" / "a"]
    assert (folder / "model" / "a").read_text() == "theirs"
    shutil.rmtree(folder)
    cache.write_folder(folder / "model", fill)
    assert [path.read_text() for path in documents(folder)] == ["ours"]


@pytest.mark.parametrize("problem", [LINEAR, MLP], ids=["linear", "mlp"])
def test_a_choice_outlives_the_process(folder: Path, problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = solve(problem)
    (document,) = documents(folder)
    assert document.parent == folder / "tiling"
    assert json.loads(document.read_text())["document"]["blocks"] == asdict(first.blocks)
    solve.cache_clear()
    monkeypatch.setattr(tiling, "search", no_search)
    assert solve(problem) == first


def test_a_damaged_choice_is_computed_again(folder: Path) -> None:
    first = solve(LINEAR)
    (file,) = documents(folder)
    content = file.read_text()
    file.write_text(content.replace('"tokens": 200', '"tokens": 128'))  # this size fits too, but was not chosen
    solve.cache_clear()
    assert solve(LINEAR) == first
    assert file.read_text() == content


def test_a_choice_is_cached_under_everything_that_determines_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variants: list[tuple[Any, Any]] = [(LINEAR, TRN1), (MLP, TRN1), (LINEAR, TRN2)]
    for problem in (LINEAR, MLP):
        for field in fields(problem):
            value = getattr(problem, field.name)
            named = {"bfloat16": "float32", "": FP8, Form.TWO: Form.ROWS, None: Pivots(64, 128)}
            other = named[value] if value in named else not value if isinstance(value, bool) else value + 64
            variants.append((replace(problem, **{field.name: other}), TRN1))
    variants += [(replace(MLP, gate_pivots=Pivots(64, 64)), TRN1)]
    variants += [(LINEAR, replace(TRN1, dma_engine_rate=27.2)), (LINEAR, replace(TRN1, sbuf_partition_bytes=64 << 10))]
    for problem, core in variants:
        solve(problem, core)
    assert len(documents(folder)) == len(variants)
    monkeypatch.setattr(tiling, "_code", lambda: "another solver")
    solve.cache_clear()
    solve(LINEAR)
    assert len(documents(folder)) == len(variants) + 1


def test_the_digest_covers_all_code_of_the_solver() -> None:
    """Every file of this project that the solver imports determines its choice, so the digest covers it."""
    folder = Path(tiling.__file__).resolve().parent
    known = {(folder / name).resolve() for name in tiling.SOURCES}
    kernels = folder.parent
    others = {
        kernels / "ops.py",
        kernels / "cache.py",
    }  # ops gives the solver its exception, cache no more than the folder
    seen: set[Path] = set()
    todo = {folder / "tiling.py"}
    while todo:
        file = todo.pop()
        seen.add(file)
        lines = [line for line in file.read_text().splitlines() if line.startswith("from neuronmm.kernels.")]
        names = {line.split()[1].removeprefix("neuronmm.kernels.").replace(".", "/") for line in lines}
        todo |= {kernels / f"{name}.py" for name in names} - seen - others
    assert seen == known
