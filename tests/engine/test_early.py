"""What is done for a model before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from neuronmm.cli import main
from neuronmm.engine import early
from neuronmm.kernels import pages
from neuronmm.models import UserError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the memory that was got ahead."""
    sizes = list[int]()
    monkeypatch.setattr(early, "get_ahead", sizes.append)
    monkeypatch.setattr(early, "_GPU", Path("no such file"))
    return sizes


def stored(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("command", [["generate", "--prompt", "w9"], ["serve", "--port", "0"]])
@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ([], True),
        (["--backend", "cpu"], True),
        (["--draft", "int4"], True),
        (["--backend", "cuda"], False),
        (["--backend", "neuron"], False),
        (["--dtype", "fp32"], False),
        (["--weight-dtype", "int8"], False),
    ],
)
def test_the_cpu_gets_memory_ahead_for_weights_as_they_are_stored(
    checkpoint: Callable[..., Path],
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    options: list[str],
    ahead: bool,
) -> None:
    def load(*_: object, **__: object) -> NoReturn:
        raise UserError("the command may end here")

    monkeypatch.setattr("neuronmm.engine.engine.load", load)
    folder = checkpoint()
    assert main([command[0], str(folder), *command[1:], *options]) == 2
    assert asked == ([stored(folder)] if ahead else [])


def test_not_for_a_gpu_nor_for_one_of_several_processes(
    checkpoint: Callable[..., Path], asked: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(early, "_GPU", tmp_path)
    early.prepare(str(checkpoint()), "auto")
    assert asked == []
    early.prepare(str(checkpoint()), "cpu")
    assert len(asked) == 1
    monkeypatch.setenv("RANK", "0")
    early.prepare(str(checkpoint()), "cpu")
    assert len(asked) == 1


def test_what_is_wrong_with_the_model_is_left_to_its_loading(
    checkpoint: Callable[..., Path], asked: list[int], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    damaged = checkpoint()
    (damaged / "model.safetensors").write_bytes(b"")
    for model in ("someone/model", "", str(tmp_path), str(tmp_path / "file"), str(damaged)):
        early.prepare(model, "cpu")
    assert asked == []


def test_the_arena_takes_it(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[int]()
    take = pages._Ahead.take
    monkeypatch.setattr(pages._Ahead, "take", lambda self: taken.append(len(self.memory)) or take(self))
    folder = checkpoint()
    assert main(["generate", str(folder), "--prompt", "w9", "--max-new-tokens", "1", "--backend", "cpu"]) == 0
    assert taken == [stored(folder)]


def test_torch_is_not_imported_before() -> None:
    code = "import sys; sys.argv = ['neuronmm']; import neuronmm.engine.early; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
