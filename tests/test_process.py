"""The command as a process: exit status, signals, pipes, closed streams and arguments that are not UTF-8."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from neuronmm import __version__, cli
from neuronmm.commands import tiling
from neuronmm.models import UserError
from tiny_models import tiny_checkpoint

MODULE = [sys.executable, "-m", "neuronmm"]
SCRIPT = [str(Path(sys.executable).with_name("neuronmm"))]
TILING = ["tiling", "--shape", "128,256,128,256", "--json"]
BUFFERED = {"PYTHONUNBUFFERED": ""}
"""Output is buffered until it is flushed, as by default."""
CONFIG = """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000, "torch_dtype": "bfloat16"}"""


def ended(
    words: list[str | bytes], cwd: Path, command: list[str] = MODULE, redirection: str = "", **environment: str
) -> tuple[int, str, str]:
    """Return status, stdout and stderr of a command in a shell that applies ``redirection``."""
    script = f'exec "$@" {redirection}'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command, *words],
        capture_output=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **BUFFERED, **environment},
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize("command", [MODULE, SCRIPT], ids=["module", "script"])
def test_the_status_goes_to_the_shell(command: list[str], tmp_path: Path) -> None:
    assert ended(["--version"], tmp_path, command) == (0, f"{__version__}\n", "")
    status, out, err = ended(["generate", "./nowhere", "--prompt", "Hi"], tmp_path, command)
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_what_transformers_says_of_a_bad_config_is_in_the_one_line(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sub_configs": {"text_config": 1}}))
    status, out, err = ended(["generate", "model", "--prompt", "Hi"], tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1) and "transformers cannot read it" in err


@pytest.mark.parametrize("command", [MODULE, SCRIPT], ids=["module", "script"])
@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_an_interruption_of_the_imports_is_one_line(command: list[str], package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text("raise KeyboardInterrupt\n")
    words: list[str | bytes] = ["generate", "./nowhere", "--prompt", "Hi"]
    assert ended(words, tmp_path, command, PYTHONPATH=str(tmp_path)) == (130, "", "neuronmm: interrupted\n")


@pytest.fixture
def in_the_foreground() -> Iterator[None]:
    """Handle SIGINT as in a terminal: a shell lets what it runs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_the_foreground")
@pytest.mark.parametrize("error", [ValueError("unknown type"), UserError("damaged"), OSError("unreadable")])
def test_an_interruption_that_a_library_made_another_error_of(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error from None

    monkeypatch.setattr(tiling, "run", run)
    assert cli.main(TILING) == 130
    assert capsys.readouterr().err == "neuronmm: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("command", [MODULE, SCRIPT], ids=["module", "script"])
def test_help_needs_no_torch(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    status, out, err = ended(["generate", "--help"], tmp_path, command, PYTHONPATH=str(tmp_path))
    assert status == 0 and "examples:" in out and err == ""


@pytest.mark.parametrize("option", ["--prompt", "--stop", "--batch-file"])
def test_a_word_that_is_not_utf_8(option: str, tmp_path: Path) -> None:
    status, out, err = ended(["generate", "./nowhere", option, b"caf\xe9"], tmp_path)
    assert (status, out) == (2, "") and err == "neuronmm: error: the argument caf\\udce9 is not UTF-8\n"


def test_dashes_that_argparse_would_drop(tmp_path: Path) -> None:
    status, out, err = ended(["generate", "./nowhere", "--prompt=--"], tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1) and "--prompt=--" in err


def test_closed_streams(tmp_path: Path) -> None:
    status, _, err = ended(TILING, tmp_path, redirection=">&-")
    assert status == 2 and err.startswith("neuronmm: error: standard output is closed")
    status, out, err = ended(["tiling", "--shape", "1,2"], tmp_path, redirection="2>&-")
    assert (status, out, err) == (2, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_under_the_output_is_one_line(tmp_path: Path) -> None:
    status, _, err = ended(TILING, tmp_path, redirection="> /dev/full")
    assert (status, err) == (1, "neuronmm tiling: error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("words", [TILING, ["predict", "config.json"]], ids=["print", "rich"])
def test_a_reader_that_has_seen_enough_is_no_error(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    with subprocess.Popen(
        [*MODULE, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **BUFFERED},
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == "" and running.wait() == 141


def test_text_that_the_terminal_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(__doc__="Say.", add_arguments=lambda parser: None, run=lambda args: print("na\u00efve"))
    monkeypatch.setattr(cli, "import_module", lambda name: module)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["generate"]) == 0 and written.getvalue() == b"na\\xefve\n"
