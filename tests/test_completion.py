"""The completion scripts: the shell that reads one completes commands, options, choices and files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from neuronmm.cli import COMMANDS, main

COMPLETE = r"""
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_shtab_neuronmm
printf '%s\n' "${COMPREPLY[@]}"
"""


def script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["--print-completion", shell]) == 0
    file = folder / "completion"
    file.write_text(capsys.readouterr().out)
    return file


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = script("bash", tmp_path, capsys)
    (tmp_path / "model.gguf").touch()

    def completions(*words: str) -> set[str]:
        command = ["bash", "-c", COMPLETE, "bash", str(file), "neuronmm", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert done.stderr == ""
        return set(done.stdout.split())

    assert set(COMMANDS) <= completions("")
    assert completions("conv") == {"convert"}
    assert completions("compress", "--shar") == {"--share-a"}
    assert completions("compress", "--method", "a") == {"asvd", "anchored"}
    assert completions("inspect", "mo") == {"model.gguf"}
    assert completions("generate", "model.gguf", "--draft", "mo") == {"model.gguf"}
    assert completions("recover", "model.gguf", "--dense", "mo") == {"model.gguf"}
    assert completions("compress", "model.gguf", "--calibration", "mo") == {"model.gguf"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_reads_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["zsh", "-n", str(script("zsh", tmp_path, capsys))], check=True)


def test_the_zsh_script_names_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script("zsh", tmp_path, capsys).read_text()
    assert text.startswith("#compdef neuronmm") and all(f"_shtab_neuronmm_{name}" in text for name in COMMANDS)


def test_the_start_of_a_command_does_not_import_shtab() -> None:
    code = "import sys; from neuronmm.cli import main; main(['--version']); sys.exit('shtab' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "abacus"])
    assert ended.value.code == 2 and "bash" in capsys.readouterr().err
