"""The command line: help, exit statuses, one-line errors; every command line in the documents parses."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from neuronmm import __version__, cli
from neuronmm.kernels import KernelError
from neuronmm.models import UserError
from tiny_models import make_tiny

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(neuronmm [a-z].*)$", re.MULTILINE)


def test_every_command_module_is_reached() -> None:
    modules = {path.stem for path in (ROOT / "neuronmm" / "commands").glob("*.py")} - {"__init__"}
    assert modules == set(cli.COMMANDS)


def test_the_installed_command_is_this_one() -> None:
    (script,) = (e for e in entry_points(group="console_scripts") if e.name == "neuronmm")
    assert script.load() is cli.main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^ +{name}\s+\S", out, re.MULTILINE) for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_commands_help_shows_its_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out and f"neuronmm {name} " in out and "--debug" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "compress" in capsys.readouterr().out


def written_commands() -> Iterator[tuple[str, str]]:
    """Yield (place, command line) of every ``neuronmm ...`` line in the commands' help and in the documents."""
    for name in cli.COMMANDS:
        for line in LINE.findall(import_module(f"neuronmm.commands.{name}").__doc__ or ""):
            yield f"{name} --help", line
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if path.is_file():
            for block in re.findall(r"^```\w*\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
                for line in LINE.findall(block.replace("\\\n", " ")):
                    yield str(path.relative_to(ROOT)), line


COMMAND_LINES = sorted(set(written_commands()))


@pytest.mark.parametrize(("where", "line"), COMMAND_LINES, ids=[f"{where}: {line}" for where, line in COMMAND_LINES])
def test_every_written_command_line_parses(where: str, line: str) -> None:
    bare = re.split(r"\s+(?:[|>(&]|2>|#)", line)[0]
    args = cli.parser().parse_args(shlex.split(bare)[1:])
    assert args.command in cli.COMMANDS


@pytest.mark.parametrize("line", ["compress A -o B --rato 0.2", "compress A", "compres A -o B", "tiling --device trn9"])
def test_a_wrong_command_line_does_not_parse(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parser().parse_args(shlex.split(line))
    err = capsys.readouterr().err
    assert ended.value.code == 2 and re.fullmatch(r"neuronmm(?: \w+)?: error: .*--help.*\n", err)


@pytest.mark.parametrize("abbreviation", ["--shar auto --fact int8", "--share-=auto --factor=int8"])
def test_an_abbreviation_stands_for_an_option_of_the_help(abbreviation: str) -> None:
    """An old name that the help does not show makes no abbreviation ambiguous, and works in full."""
    args = cli.parser().parse_args(shlex.split(f"compress A -o B {abbreviation}"))
    assert (args.share_a, args.factor_dtype, args.share, args.factors) == ("auto", "int8", None, None)
    args = cli.parser().parse_args(shlex.split("compress A -o B --share off --factors int8"))
    assert (args.share_a, args.factor_dtype, args.share, args.factors) == (None, None, "off", "int8")


MISSING = {
    "compress": ["compress", "./nowhere", "-o", "out"],
    "recover": ["recover", "./nowhere", "-o", "out"],
    "convert": ["convert", "./nowhere", "-o", "out"],
    "generate": ["generate", "./nowhere", "--prompt", "Hi"],
    "benchmark": ["benchmark", "./nowhere"],
    "evaluate": ["evaluate", "./nowhere", "--text", "nowhere.txt"],
    "inspect": ["inspect", "./nowhere"],
    "report": ["report", "./nowhere"],
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_model_is_one_line_and_status_2(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(MISSING[name]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.strip()]
    assert out == "" and lines[-1].startswith(f"neuronmm {name}: error: ") and "nowhere" in lines[-1]
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError):
        cli.main([*MISSING[name], "--debug"])


BAD_INPUT = [
    ["compress", "{model}", "-o", "{out}", "--ratio", "0.99"],
    ["compress", "{model}", "-o", "{out}", "--ratio", "nan"],
    ["compress", "{model}", "-o", "{out}", "--align", "-3"],
    ["compress", "{model}", "-o", "{out}", "--calibration", "nowhere.txt"],
    ["compress", "{model}", "-o", "{out}", "--recipe", "nowhere.yaml"],
    ["compress", "{model}", "-o", "{model}"],
    ["compress", "{other}", "-o", "{out}"],
    ["recover", "{model}", "-o", "{out}"],
    ["recover", "{other}", "-o", "{out}"],
    ["convert", "{model}", "-o", "{out}"],
    ["convert", "{model}", "-o", "{out}", "--form", "two"],
    ["convert", "{model}", "-o", "{out}", "--form", "rows"],
    ["convert", "{model}", "-o", "{model}"],
    ["convert", "{other}", "-o", "{out}"],
    ["generate", "{other}", "--prompt", "Hi"],
    ["generate", "{model}", "--prompt", "Hi"],
    ["generate", "{model}", "--prompt", "Hi", "--backend", "abacus"],
    ["generate", "{model}", "--prompt", "Hi", "--dtype", "fp7"],
    ["generate", "{model}", "--prompt", "Hi", "--temperature", "-1"],
    ["generate", "{model}", "--prompt", "Hi", "--max-new-tokens", "0"],
    ["generate", "{model}", "--batch-file", "nowhere.jsonl"],
    ["benchmark", "{other}"],
    ["benchmark", "{model}", "--runs", "0"],
    ["benchmark", "{model}", "--backend", "abacus"],
    ["benchmark", "{model}", "--baseline", "{other}"],
    ["evaluate", "{model}", "--text", "nowhere.txt"],
    ["evaluate", "{other}", "--text", "nowhere.txt"],
    ["inspect", "{other}"],
    ["report", "{model}"],
    ["report", "{other}"],
    ["report", "{model}", "-o", "{model}/page.html"],
    ["compress", "{model}", "-o", "{out}", "--align", "\N{SUPERSCRIPT TWO}"],
    ["compress", "{model}", "-o", "~nouser/x"],
    ["recover", "{model}", "-o", "~nouser/x"],
    ["convert", "{model}", "-o", "~nouser/x"],
    ["generate", "{model}", "--prompt", "Hi", "--temperature", "1e-40"],
    ["generate", "{model}", "--prompt", "Hi", "--repetition-penalty", "1e-40"],
    ["benchmark", "{model}", "--batch", "1000000000"],
    ["benchmark", "{model}", "--batch", "1,,2"],
    ["benchmark", "{model}", "--threads", "100000"],
    ["benchmark", "{model}", "--runs", "99999999999999999999"],
    ["sweep", "{model}", "-o", "{out}", "--text", "~nouser/x"],
    ["sweep", "{model}", "-o", "{out}", "--text", "nowhere.txt", "--ratios", "\N{SUPERSCRIPT TWO}"],
    ["tiling", "--mlp", "4096,999999937,999999937,7"],
    ["tiling", "--shape", "1,1,1,\N{SUPERSCRIPT TWO}"],
    ["tiling", "--shape", ""],
    *([verb, "~nouser/x", *MISSING[verb][2:]] for verb in MISSING),
    ["predict", "~nouser/x"],
]


def status_of(words: list[str]) -> int:
    """Return the exit status of a command line, returned or raised."""
    try:
        return cli.main(words)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


@pytest.mark.parametrize("command", BAD_INPUT, ids=" ".join)
def test_bad_input_is_one_line_and_status_2(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny().save_pretrained(tmp_path / "model")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}')
    (tmp_path / "other" / "model.safetensors").touch()
    capsys.readouterr()
    status = status_of([part.format(model="model", other="other", out="out") for part in command])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith(f"neuronmm {command[0]}: error: "), err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """``failing(error)`` returns the status of a command that raises ``error``."""

    def run_with(error: BaseException) -> int:
        def run(args: argparse.Namespace) -> None:
            raise error

        module = SimpleNamespace(__doc__="Fail.", add_arguments=lambda parser: None, run=run)
        monkeypatch.setattr(cli, "import_module", lambda name: module)
        return cli.main(["generate"])

    return run_with


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("no such thing"), 2, "neuronmm generate: error: no such thing"),
        (KernelError("cannot run"), 2, "neuronmm generate: error: cannot run"),
        (OSError(28, "No space left on device"), 1, "neuronmm generate: error: [Errno 28] No space left on device"),
        (MemoryError(), 1, "neuronmm generate: error: not enough memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 32 bytes."), 1,
         "neuronmm generate: error: not enough memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), 1, "neuronmm generate: error: not enough memory"),
        (KeyboardInterrupt(), 130, "neuronmm: interrupted"),
    ],
)  # fmt: skip
def test_failures_become_one_line(
    error: BaseException,
    status: int,
    line: str,
    failing: Callable[[BaseException], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert failing(error) == status
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("shapes do not match")])
def test_a_defect_is_not_hidden(error: Exception, failing: Callable[[BaseException], int]) -> None:
    with pytest.raises(type(error)):
        failing(error)
