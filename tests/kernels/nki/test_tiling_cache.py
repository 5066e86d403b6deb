"""What is kept on disk: whole documents and folders or none, whoever writes; and the tiling solver's choices."""

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
from neuronmm.kernels.nki.problem import MlpProblem, Problem
from neuronmm.kernels.nki.tiling import solve

LINEAR = Problem(200, 576, 128, 300)
MLP = MlpProblem(200, 576, 1536, 128, 128, 128)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the folder is not there yet."""
    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path / "cache"))
    solve.cache_clear()
    return tmp_path / "cache"


def documents(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def no_search(*_: Any) -> Any:
    raise AssertionError("searched, though the choice was kept")


def test_a_document_comes_back_and_leaves_nothing_else(folder: Path) -> None:
    assert cache.read("a/b.json") is None
    cache.write("a/b.json", {"x": [1, 2.5, "y"]})
    cache.write("a/b.json", {"x": [3]})
    assert cache.read("a/b.json") == {"x": [3]}
    assert documents(folder) == [folder / "a" / "b.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: b"",
        lambda kept: kept[: len(kept) // 2],
        lambda kept: b"[]",
        lambda kept: b"1",
        lambda kept: b"\xff\xfe",
        lambda kept: kept.replace(b"256", b"257"),
        lambda kept: kept.replace(b"blocks", b"others"),
    ],
)
def test_a_damaged_document_counts_as_missing(folder: Path, damage: Any) -> None:
    cache.write("x.json", {"blocks": 256})
    whole = (folder / "x.json").read_bytes()
    assert damage(whole) != whole
    (folder / "x.json").write_bytes(damage(whole))
    assert cache.read("x.json") is None


def test_a_folder_that_cannot_be_written_is_done_without(folder: Path) -> None:
    folder.write_text("a file")
    cache.write("a/b.json", 1)
    assert cache.read("a/b.json") is None
    assert solve(LINEAR).blocks == tiling.search(LINEAR, TRN1).blocks


def test_readers_see_whole_documents_while_processes_write(folder: Path) -> None:
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


def test_a_folder_appears_whole_or_not_at_all(folder: Path) -> None:
    def fill(inside: Path, *, fail: bool = False, other: bool = False) -> None:
        assert not (folder / "model").exists()
        (inside / "a").write_text("ours")
        if other:  # another process finishes the same folder while this one writes
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
    (kept,) = documents(folder)
    assert kept.parent == folder / "tiling"
    assert json.loads(kept.read_text())["document"]["blocks"] == asdict(first.blocks)
    solve.cache_clear()
    monkeypatch.setattr(tiling, "search", no_search)
    assert solve(problem) == first


def test_a_damaged_choice_is_made_anew(folder: Path) -> None:
    first = solve(LINEAR)
    (file,) = documents(folder)
    whole = file.read_text()
    file.write_text(whole.replace('"tokens": 200', '"tokens": 128'))  # these fit as well, but were not chosen
    solve.cache_clear()
    assert solve(LINEAR) == first
    assert file.read_text() == whole


def test_a_choice_belongs_to_everything_it_follows_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variants: list[tuple[Any, Any]] = [(LINEAR, TRN1), (MLP, TRN1), (LINEAR, TRN2)]
    for problem in (LINEAR, MLP):
        for field in fields(problem):
            value = getattr(problem, field.name)
            other = "float32" if value == "bfloat16" else not value if isinstance(value, bool) else value + 64
            variants.append((replace(problem, **{field.name: other}), TRN1))
    variants += [(LINEAR, replace(TRN1, dma_engine_rate=27.2)), (LINEAR, replace(TRN1, sbuf_partition_bytes=64 << 10))]
    for problem, core in variants:
        solve(problem, core)
    assert len(documents(folder)) == len(variants)
    monkeypatch.setattr(tiling, "_code", lambda: "another solver")
    solve.cache_clear()
    solve(LINEAR)
    assert len(documents(folder)) == len(variants) + 1


def test_the_code_that_counts_is_all_there() -> None:
    """What the solver imports of this project decides what it finds: each such file is in its digest."""
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
