"""A sweep's folder: apart from the inputs, locked by one process, and repaired after damage."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from compression_runs import snapshot
from neuronmm.compression.claim import MARK
from neuronmm.compression.config import BARE, CompressionConfig
from neuronmm.compression.workspace import Workspace
from neuronmm.measure import sweep as sweeping
from neuronmm.measure.sweep import sweep
from neuronmm.measure.sweep_config import SweepConfig
from neuronmm.measure.sweep_points import SweepPoint, add_point
from neuronmm.models import UserError
from tiny_models import make_tiny
from word_tokenizer import word_tokenizer

BASE = CompressionConfig(align=2, calibration_rows=4, calibration_length=12, **BARE)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, which holds a model and a text."""
    make_tiny().save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(f"w{3 + i * i % 61}" for i in range(90)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(out: str, text: str = "text.txt", **options: Any) -> list[SweepPoint]:
    """Sweep one point, and return it with the dense model's."""
    return sweep("model", out, SweepConfig([0.4], ["whitened"], [text], BASE, context=30), **options).points


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("model", "is or is inside model"),
        ("model/sweep", "is or is inside model"),
        ("link", "is or is inside model"),
        (".", "holds model"),
        ("/", "holds model"),
        ("~nobody-of-that-name", "no such user"),
        ("nothing", "symlink to nowhere"),
        ("text.txt", r"is or is inside .*text\.txt"),
        ("file/sweep", "cannot be written"),
        ("stranger", "exists already|not the folder of a sweep"),
        ("listed", "exists already|not the folder of a sweep"),
        ("torn", "exists already|not the folder of a sweep"),
        ("low.partial", "exists already|not the folder of a sweep"),
    ],
)
def test_a_dangerous_folder_is_refused_before_a_model_is_read(
    out: str, message: str, resume: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "resolve", lambda *arguments: pytest.fail("the model was read"))
    (place / "link").symlink_to("model")
    (place / "nothing").symlink_to("nowhere")
    (place / "file").write_text("mine")
    for name, content in (("stranger", None), ("listed", "[]"), ("torn", '{"model": "mo')):
        (place / name).mkdir()
        (place / name / "sweep.json").write_text("mine")
        if content is not None:
            (place / name / "run.json").write_text(content)
    with Workspace("low", ["model"], resume=False, force=False) as work:  # compress was interrupted here
        work.begin({"model": "model"})
        work.save("calibration", {})
    before = snapshot(place)
    with pytest.raises(UserError, match=message):
        run(out, resume=resume)
    assert snapshot(place) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"align": 1000}, "align"),
        ({"calibration": "absent.txt"}, "no such calibration file"),
        ({"calibration": "short.txt"}, "fewer than one row"),
    ],
)
def test_what_compress_would_refuse_is_refused_before_anything_is_measured(
    changes: dict[str, Any], message: str, place: Path
) -> None:
    (place / "short.txt").write_text("w5 w6")
    config = SweepConfig([0.4], ["whitened"], ["text.txt"], BASE.model_copy(update=changes), context=30)
    before = snapshot(place)
    with pytest.raises(UserError, match=message):
        sweep("model", "sweep", config)
    assert snapshot(place) == before


def test_a_compressed_model_is_refused_before_anything_is_measured(place: Path) -> None:
    run("sweep")
    shutil.move("sweep/whitened-0.4", "low")
    before = snapshot(place)
    with pytest.raises(UserError, match="already compressed"):
        sweep("low", "other", SweepConfig([0.4], ["whitened"], ["text.txt"], BASE, context=30))
    assert snapshot(place) == before


def test_the_name_of_a_work_folder_is_refused(place: Path) -> None:
    """No point could be compressed in it."""
    before = snapshot(place)
    with pytest.raises(UserError, match="has the name of a work folder"):
        run("sweep.partial")
    assert snapshot(place) == before


def test_a_folder_in_the_work_folder_of_a_run_is_refused(place: Path) -> None:
    (place / "low.partial").mkdir()
    (place / "low.partial" / MARK).touch()
    before = snapshot(place)
    with pytest.raises(UserError, match=r"is inside .*low\.partial, the work folder of another run"):
        run("low.partial/sweep")
    assert snapshot(place) == before


def test_text_in_the_folder_is_refused(place: Path) -> None:
    run("sweep")
    shutil.copy("text.txt", "sweep/text.txt")
    before = snapshot(place)
    with pytest.raises(UserError, match=r"holds .*sweep/text\.txt"):
        run("sweep", text="sweep/text.txt", resume=True)
    assert snapshot(place) == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_sweep_names_the_process_that_works_there(resume: bool, place: Path) -> None:
    refusals: list[str] = []

    def meanwhile(stage: str, fraction: float) -> None:
        with pytest.raises(UserError) as refused:
            run("sweep", resume=resume)
        refusals.append(str(refused.value))

    points = run("sweep", progress=meanwhile)
    assert len(points) == 2 and not (place / "sweep" / MARK).exists()
    wanted = f"process {os.getpid()} on " if resume else "exists already"
    assert refusals and all(wanted in message for message in refusals)


def test_a_sweep_that_was_killed_at_once_starts_again(place: Path) -> None:
    (place / "sweep").mkdir()
    (place / "sweep" / MARK).touch()
    assert len(run("sweep")) == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "whitened", "ratio'])
def test_a_damaged_point_is_measured_again(content: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("sweep")
    monkeypatch.setattr(sweeping, "create_point", lambda *a: pytest.fail("compressed again"))
    for file in sorted((place / "sweep").glob("*.point.json")):
        file.write_text(content)
        assert run("sweep", resume=True) == expected
    (place / "sweep" / "run.json").write_text("[]")
    with pytest.raises(UserError, match="not the folder of a sweep"):
        add_point(place / "sweep", "dense", place / "model", {"name": "dense", "ratio": 0.0})


@pytest.mark.parametrize("file", ["text.txt", "model/model.safetensors"])
def test_a_resumed_sweep_refuses_a_text_or_model_that_has_changed(file: str, place: Path) -> None:
    expected, settings = run("sweep"), place / "sweep" / "run.json"
    (place / file).write_bytes((place / file).read_bytes())
    os.utime(place / file, (1, 1))
    if file == "text.txt":  # the same content is the same text
        assert run("sweep", resume=True) == expected
        (place / file).write_text("w5 " * 200)
    with pytest.raises(UserError, match=f"{Path(file).parts[0]} has changed since the sweep measured it"):
        run("sweep", resume=True)
    noted = json.loads(settings.read_text())
    del noted["contents"]  # as an earlier version wrote it
    settings.write_text(json.dumps(noted))
    assert len(run("sweep", resume=True)) == len(expected)


@pytest.mark.parametrize("content", ["", "[]", '{"verb"'])
def test_a_point_with_a_damaged_description_is_created_again(
    content: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run("uninterrupted")

    def stop(stage: str, fraction: float) -> None:
        if stage == "compressing" and fraction:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("sweep", progress=stop)
    (place / "sweep" / "whitened-0.4.partial" / "run.json").write_text(content)
    points = run("sweep", resume=True)
    assert points[1]["perplexity"] == expected[1]["perplexity"]
    assert json.loads((place / "sweep" / "sweep.json").read_text())["points"] == points
    assert "texts" in json.loads((place / "sweep" / "run.json").read_text())
