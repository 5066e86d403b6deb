"""``--push``: only the checkpoint is uploaded, to a new and private repository; every failure is one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import filter_repo_objects

from compression_runs import config
from neuronmm.cli import main
from neuronmm.compression import push as module
from neuronmm.compression.pipeline import compress
from neuronmm.compression.push import push

REPO = "somebody/llama-low"
NO_CONNECTION: type[Exception] = HfHubHTTPError.__bases__[0]


class FakeHub:
    """Stands for HfApi: takes part of its calls and arguments, as the library's own names, and records them.

    ``fail`` maps a call to the exception that it raises.
    """

    def __init__(self) -> None:
        self.existing: set[str] = set()
        self.fail: dict[str, Exception] = {}
        self.calls: list[str] = []
        self.uploaded: dict[str, bytes] = {}

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise self.fail[name]

    def whoami(self) -> dict[str, str]:
        self._call("whoami")
        return {"name": "somebody"}

    def repo_exists(self, repo_id: str) -> bool:
        self._call("repo_exists")
        return repo_id in self.existing

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool = False) -> str:
        self._call("create_repo")
        assert private and not exist_ok
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], commit_message: str) -> None:
        self._call("upload_folder")
        assert repo_id == REPO and commit_message
        names = [str(file.relative_to(folder_path)) for file in folder_path.rglob("*") if file.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            self.uploaded[name] = (folder_path / name).read_bytes()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(module, "HfApi", lambda **_: fake)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return fake


def command(dense: Path, out: Path, repo: str = REPO) -> list[str]:
    settings = ["--ratio", "0.3", "--method", "svd", "--refine", "off", "--align", "2"]
    return ["compress", str(dense), "-o", str(out), *settings, "--push", repo]


def test_the_command_uploads_the_checkpoint_with_a_valid_card(
    hub: FakeHub, dense: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(dense(), tmp_path / "out")) == 0
    assert hub.calls == ["whoami", "repo_exists", "create_repo", "upload_folder"]
    assert hub.uploaded == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    card = ModelCard(hub.uploaded["README.md"].decode())
    assert card.data.library_name == "transformers" and "neuronmm" in (card.data.tags or [])
    assert f"https://huggingface.co/{REPO}" in capsys.readouterr().err


def test_nothing_but_the_checkpoint_is_uploaded(hub: FakeHub, dense: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = compress(dense(), out, config(ratio=0.3))
    for name in ("notes.txt", "config.json.bak", "sub/config.json", ".git/config", "model-extra.safetensors"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    assert REPO in push(out, report, REPO)
    assert sorted(hub.uploaded) == report["files"] and "model.safetensors" in report["files"]


@pytest.mark.parametrize(
    ("repo", "change", "said"),
    [
        ("low", {}, "USER/NAME"),
        ("a/b/c", {}, "USER/NAME"),
        ("somebody/low\nx", {}, "USER/NAME"),
        (REPO, {"existing": {REPO}}, "exists already"),
        (REPO, {"fail": {"whoami": LocalTokenNotFoundError("no\ntoken")}}, "hf auth login"),
        (REPO, {"fail": {"whoami": NO_CONNECTION("no route")}}, "no route"),
        (REPO, {"fail": {"repo_exists": OSError("no answer")}}, "no answer"),
    ],
)
def test_what_cannot_be_uploaded_is_refused_before_the_run(
    repo: str,
    change: dict[str, Any],
    said: str,
    hub: FakeHub,
    dense: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    vars(hub).update(change)
    source = dense()
    capsys.readouterr()
    before = sorted(tmp_path.iterdir())
    assert main(command(source, tmp_path / "out", repo)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "--push" in err and said in err
    assert sorted(tmp_path.iterdir()) == before and not hub.uploaded


def test_offline_mode_is_refused_without_a_call(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(command(tmp_path, tmp_path / "out")) == 2
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err and hub.calls == []


def test_a_failed_upload_leaves_the_checkpoint_and_says_how_to_repeat_it(
    hub: FakeHub, dense: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = OSError("refused")
    refused.response = SimpleNamespace(status_code=401)  # type: ignore[attr-defined]
    for number, (error, said) in enumerate([(OSError("disconnected\nlater"), "disconnected"), (refused, "token")]):
        hub.fail = {"upload_folder": error}
        out = tmp_path / f"out{number}"
        assert main(command(dense(), out)) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert said in line and f"hf upload {REPO} {out}" in line
        assert (out / "model.safetensors").is_file() and not hub.uploaded
