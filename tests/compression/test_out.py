"""Files that a run may write: it changes neither its inputs nor other files, and two runs never share an OUT."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from compression_runs import config, snapshot, tensors
from neuronmm import cli
from neuronmm.compression import pipeline
from neuronmm.compression.claim import MARK, Claim
from neuronmm.compression.pipeline import compress
from neuronmm.compression.recover import recover
from neuronmm.compression.workspace import Workspace
from neuronmm.models import UserError
from neuronmm.models.load import load_pretrained

FLAGS = [{}, {"force": True}, {"resume": True}, {"force": True, "resume": True}]


@pytest.fixture
def shelf(dense: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the current directory and home ``shelf`` with a model, its compressed checkpoint and other files."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    shutil.move(dense(), shelf / "model")
    monkeypatch.chdir(shelf)
    monkeypatch.setenv("HOME", str(shelf))
    compress("model", "low", config(method="svd"))
    text.rename(shelf / "text.txt")
    for name in ("old", "noted", "templated", "texted", "nested", "around", "unnamed"):
        shutil.copytree("low", name)
    (shelf / "noted" / "notes.txt").write_text("mine")
    (shelf / "templated" / "mine.jinja").write_text("mine")
    content = json.loads((shelf / "unnamed" / "compression_report.json").read_text())
    del content["files"]
    (shelf / "unnamed" / "compression_report.json").write_text(json.dumps(content))
    for name, listed in (("patterned", "*"), ("folders", "*/")):
        shutil.copytree("low", name)
        (shelf / name / "mine").mkdir()
        (shelf / name / "mine" / "notes.txt").write_text("mine")
        content["files"] = [*(file.name for file in (shelf / "low").iterdir()), listed, "mine/"]
        (shelf / name / "compression_report.json").write_text(json.dumps(content))
    (shelf / "texted" / "tokenizer_text.txt").write_text("w5 w6 w7 " * 40)
    (shelf / "nested" / "tokenizer_thesis").mkdir()
    (shelf / "nested" / "tokenizer_thesis" / "chapter.txt").write_text("mine")
    shutil.copytree("model", shelf / "around" / "model")
    shutil.copytree("model", "taken.partial")
    shutil.copytree("model", "free.replaced")
    (shelf / "marked.partial").mkdir()
    (shelf / "marked.partial" / MARK).touch()
    (shelf / "marked.partial" / "notes.txt").write_text("mine")
    (shelf / "stranger").mkdir()
    (shelf / "stranger" / "photo.jpg").write_bytes(b"mine")
    (shelf / "file").write_text("mine")
    (shelf / "reported").mkdir()
    (shelf / "reported" / "compression_report.json").write_text('{"kind": "measured", "ratio": 0.2}')
    (shelf / "to-model").symlink_to("model")
    (shelf / "to-low").symlink_to(shelf / "low", target_is_directory=True)
    (shelf / "to-nothing").symlink_to("nowhere")
    (shelf / "linked.partial").symlink_to("stranger", target_is_directory=True)
    (shelf / "weights.gguf").write_bytes(b"GGUF")
    shutil.copytree("low", "with-gguf")
    (shelf / "with-gguf" / "model.gguf").write_bytes(b"GGUF")
    made = shelf / "of-links"
    made.mkdir()
    for file in (shelf / "low").iterdir():
        (made / file.name).symlink_to(file)
    return shelf


REFUSED = [
    ("model", "model", "is or is inside model"),
    ("model", "./model/", "is or is inside"),
    ("model", "old/../model", "is or is inside"),
    ("model", "~/model", "is or is inside"),
    ("~/model", "model", "is or is inside"),
    ("model", "to-model", "is or is inside"),
    ("to-model", "model", "is or is inside"),
    ("to-model", "to-model", "is or is inside"),
    ("model", "model/out", "is or is inside"),
    ("model", "to-model/sub/out", "is or is inside"),
    ("around/model", "around", "holds around/model"),
    ("with-gguf/model.gguf", "with-gguf", "holds with-gguf/model.gguf"),
    ("weights.gguf", "weights.gguf", "is or is inside"),
    ("of-links", "low", "holds of-links"),
    ("model", ".", "current directory or one above"),
    ("model", "..", "current directory or one above"),
    ("model", "/", "current directory or one above"),
    ("model", "", "an empty name"),
    ("", "low", "an empty name"),
    ("model", "marked.partial/out", "is inside .*marked.partial, the work folder of another run"),
    ("model", "~", "current directory or one above"),
    ("model", "~nobody-of-that-name/out", "no such user"),
    ("model", "stranger", "exists already|has no compression_report.json"),
    ("model", "reported", "exists already|has no compression_report.json"),
    ("model", "file", "exists already|has no compression_report.json"),
    ("model", "noted", "exists already|holds notes.txt"),
    ("model", "templated", "exists already|holds mine.jinja"),
    ("model", "unnamed", "exists already|has no .* that names its files .older versions .* move that folder away"),
    ("model", "patterned", "exists already|holds mine"),
    ("model", "folders", "exists already|holds mine"),
    ("model", "nested", "exists already|holds tokenizer_thesis"),
    ("model", "taken", "was not made by neuronmm"),
    ("taken.partial", "taken", "is or is inside taken.partial"),
    ("model", "marked", "holds notes.txt"),
    ("model", "linked", "is not a folder"),
    ("model", "to-nothing", "symlink to nowhere"),
    ("model", "file/out", "cannot be written"),
    ("hub/model", "stranger", "exists already|has no compression_report.json"),
]


@pytest.mark.parametrize(("model", "out", "message"), REFUSED)
def test_a_dangerous_out_is_refused_before_the_model_is_read(
    model: str, out: str, message: str, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(shelf.parent)
    monkeypatch.setattr(pipeline, "resolve", lambda *arguments: pytest.fail("the model was looked at"))
    for flags in FLAGS:
        with pytest.raises(UserError, match=message) as refused:
            compress(model, out, config(), **flags)
        assert "\n" not in str(refused.value)
        assert snapshot(shelf.parent) == before


@pytest.mark.parametrize("flags", FLAGS[1:], ids="+".join)
def test_the_calibration_text_is_not_replaced(flags: dict[str, bool], shelf: Path) -> None:
    before = snapshot(shelf.parent)
    with pytest.raises(UserError, match=r"texted: holds texted/tokenizer_text\.txt"):
        compress("model", "texted", config(calibration="texted/tokenizer_text.txt"), **flags)
    assert snapshot(shelf.parent) == before


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "plain")
@pytest.mark.parametrize(
    ("out", "teacher"),
    [("low", None), ("to-low", None), ("model", "model"), ("model", None), ("model/out", None), (".", None)],
)
def test_recover_overwrites_neither_the_checkpoint_nor_the_dense_model(
    out: str, teacher: str | None, flags: dict[str, bool], shelf: Path
) -> None:
    compress("model", "low", config(method="whitened", calibration=str(shelf / "text.txt")), force=True)
    before = snapshot(shelf.parent)
    with pytest.raises(
        UserError, match=r"which this run reads|current directory|exists already|has no compression_report\.json"
    ):
        recover("low", out, dense=teacher, **flags)
    assert snapshot(shelf.parent) == before


def test_the_command_refuses_in_one_line(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(shelf.parent)
    for out in ("model", ".", "/", "stranger", "to-nothing", "file/out"):
        assert cli.main(["compress", "model", "-o", out, "--force"]) == 2
        captured = capsys.readouterr()
        line = captured.err.strip()
        assert captured.out == "" and "\n" not in line and line.startswith("neuronmm compress: error: ")
    assert snapshot(shelf.parent) == before


def test_an_interrupted_command_names_the_work_folder_or_says_that_nothing_is_kept(
    shelf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (shelf / "recipe.yaml").write_text("align: 2\ncalibration_rows: 4\ncalibration_length: 12\n")
    command = ["compress", "model", "-o", "to-low/../new", "--recipe", "recipe.yaml", "--calibration", "text.txt"]
    for step, said in (("resolve", "nothing is kept"), ("StreamedModel", f"is in {shelf / 'new.partial'}: repeat")):
        with monkeypatch.context() as patched:
            patched.setattr(pipeline, step, Mock(side_effect=KeyboardInterrupt))
            assert cli.main(command) == 130
        assert said in capsys.readouterr().err
    assert cli.main([*command, "--resume"]) == 0


def test_force_replaces_only_a_checkpoint_of_neuronmm(shelf: Path) -> None:
    for link in ("to-nothing", "linked.partial"):
        (shelf / link).unlink()
    before = snapshot(shelf)
    compress("model", "old", config(method="svd", ratio=0.4), force=True)
    compress("model", "to-low/", config(method="svd", ratio=0.4), force=True)
    compress("model", "free", config(method="svd", ratio=0.4))
    after = snapshot(shelf)
    changed = {name.partition("/")[0] for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == {"old", "low", "free"}
    assert tensors(shelf / "old").keys() == tensors(shelf / "low").keys() == tensors(shelf / "free").keys()


def test_force_replaces_a_checkpoint_with_a_file_named_like_a_pattern(shelf: Path) -> None:
    (shelf / "model" / "tokenizer[1].json").write_text("{}")
    for flags in ({}, {"force": True}):
        compress("model", "new", config(method="svd"), **flags)
    assert (shelf / "new" / "tokenizer[1].json").exists()


@pytest.mark.parametrize(("out", "flags"), [("old", {"force": True}), ("new", {})])
def test_a_folder_that_is_filled_during_a_run_is_not_replaced(out: str, flags: dict[str, bool], shelf: Path) -> None:
    def fill(stage: str, fraction: float) -> None:
        (shelf / out).mkdir(exist_ok=True)
        (shelf / out / "notes.txt").write_text("mine")

    with pytest.raises(UserError, match=r"exists already|holds notes\.txt"):
        compress("model", out, config(method="svd"), **flags, progress=fill)
    assert (shelf / out / "notes.txt").read_text() == "mine"
    (shelf / out / "notes.txt").rename("notes.txt")
    if out == "new":
        (shelf / out).rmdir()
    compress("model", out, config(method="svd"), resume=True, **flags)
    load_pretrained(shelf / out, pipeline.torch.float32)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "plain")
def test_a_second_run_for_the_same_out_names_the_first(flags: dict[str, bool], shelf: Path) -> None:
    refusals: list[str] = []

    def meanwhile(stage: str, fraction: float) -> None:
        if not refusals:
            with pytest.raises(UserError) as refused:
                compress("model", "to-low" if flags.get("force") else "new", config(), **flags)
            refusals.append(str(refused.value))

    compress("model", "low" if flags.get("force") else "new", config(), force=True, progress=meanwhile)
    assert f"process {os.getpid()} on {socket.gethostname()} has been at work there since 20" in refusals[0]
    load_pretrained(shelf / ("low" if flags.get("force") else "new"), pipeline.torch.float32)


def test_an_empty_folder_is_filled_without_force(shelf: Path) -> None:
    (shelf / "new").mkdir()
    compress("model", "new", config())
    load_pretrained(shelf / "new", pipeline.torch.float32)


def test_the_folder_is_locked_before_the_model_is_read(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(model: Any, progress: Any) -> Path:
        with pytest.raises(UserError, match="at work there"):
            Claim(shelf / "deep" / "new.partial")
        raise UserError("seen")

    monkeypatch.setattr(pipeline, "resolve", resolve)
    with pytest.raises(UserError, match="seen"):
        compress("model", "deep/new", config())
    assert not (shelf / "deep").exists(), "what was made for a run that did nothing is removed"


def test_a_mark_that_is_a_link_to_another_file_is_not_written(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("notes")
    (tmp_path / "work").mkdir()
    os.link(notes, tmp_path / "work" / MARK)
    with pytest.raises(UserError, match="was not written by neuronmm"):
        Claim(tmp_path / "work")
    assert notes.read_text() == "notes"


@pytest.mark.parametrize("third", [False, True])
def test_a_lock_on_a_removed_file_is_taken_again(third: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run removes the folder, and a third may take it, while another run opens and locks its mark."""
    first, opened = Claim(tmp_path / "work"), os.open

    def slow(path: Path, *arguments: int) -> int:
        handle = opened(path, *arguments)
        monkeypatch.setattr(os, "open", opened)
        first.remove()
        if third:
            Claim(tmp_path / "work")
        return handle

    monkeypatch.setattr(os, "open", slow)
    if not third:
        Claim(tmp_path / "work")
    with pytest.raises(UserError, match="at work there"):
        Claim(tmp_path / "work")


def test_a_read_only_folder_is_refused_at_once(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "resolve", lambda *arguments: pytest.fail("the model was looked at"))
    before = snapshot(shelf)
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: Path(path) != shelf / "low")  # root may write everywhere
        with pytest.raises(UserError, match="low: is read-only"):
            compress("model", "low", config(), force=True)

    def refuse(path: Path, *arguments: int, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(UserError, match=r"new\.partial: cannot be written \(Permission denied\)"):
        compress("model", "new", config())
    assert snapshot(shelf) == before


def test_an_empty_workspace_leaves_no_folder(shelf: Path) -> None:
    before = snapshot(shelf)
    with Workspace("new", ["model"], resume=False, force=False) as workspace:
        workspace.begin({"ratio": 1})
    assert snapshot(shelf) == before


def test_a_mount_point_is_refused_at_once(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "resolve", lambda *arguments: pytest.fail("the model was looked at"))
    (shelf / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == shelf / "volume")
    with pytest.raises(UserError, match=r"volume: is a mount point.*give a folder inside"):
        compress("model", "volume", config())


def test_named_chat_templates_are_copied_and_stay_ours(shelf: Path) -> None:
    templates = shelf / "model" / "additional_chat_templates"
    templates.mkdir()
    (templates / "tools.jinja").write_text("{{ messages }}")
    (templates / "notes.txt").write_text("no template")
    settings = config(method="svd")
    report = compress("model", "new", settings)
    copied = shelf / "new" / "additional_chat_templates"
    assert [file.name for file in copied.iterdir()] == ["tools.jinja"]
    assert "additional_chat_templates/tools.jinja" in report["files"]
    (copied / "mine.jinja").write_text("a user's")
    with pytest.raises(UserError, match=r"holds additional_chat_templates/mine\.jinja, which neuronmm did not write"):
        compress("model", "new", settings, force=True)
    (copied / "mine.jinja").unlink()
    compress("model", "new", settings, force=True)


def test_folders_beside_the_tokenizer_are_not_copied(shelf: Path) -> None:
    (shelf / "model" / "tokenizer_old").mkdir()
    compress("model", "new", config(method="svd"))
    recover("new", "trained", calibration=str(shelf / "text.txt"), calibration_rows=8, calibration_length=12)
    assert not (shelf / "new" / "tokenizer_old").exists() and (shelf / "trained" / "config.json").exists()
