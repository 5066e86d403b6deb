"""The command line: help, exit statuses, one-line errors; every command line in the documents parses."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
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
from word_tokenizer import word_tokenizer

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


@pytest.mark.parametrize(
    "command", ["evaluate A --tasks", "sweep A -o B --text t --tasks", "sweep A -o B --text", "report A --evaluation"]
)
def test_an_option_of_several_files_may_be_repeated(command: str) -> None:
    """No file is dropped, and one command leaves nothing to the next."""
    option = command.rpartition(" ")[2]
    root = cli.parser()
    for _ in range(2):
        args = root.parse_args(shlex.split(f"{command} a b {option} c"))
        assert getattr(args, option.strip("-")) == [Path("a"), Path("b"), Path("c")]


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


_RECIPE, _SHORT = "--recipe recipe.yaml", "--prompt-lengths 4 --new-tokens 2"
_UNSUPPORTED, _NO_USER = "architecture MambaForCausalLM is not supported", "~nouser/x: this machine has no such user"

BAD_INPUT = {
    f"compress model -o out {_RECIPE} --ratio 0.99": "error: ratio = 0.99: input should be less than",
    f"compress model -o out {_RECIPE} --ratio nan": "error: ratio = nan: input should be less than",
    f"compress model -o out {_RECIPE} --align -3": "--align: '-3': must be a positive number",
    f"compress model -o out {_RECIPE} --align \N{SUPERSCRIPT TWO}": "must be a positive number of ranks, or auto",
    f"compress model -o out {_RECIPE} --calibration nowhere.txt": "nowhere.txt: no such calibration file",
    "compress model -o out --recipe nowhere.yaml": "nowhere.yaml: not a readable recipe",
    "compress model -o out --recipe wrong.yaml": "wrong.yaml: ratio = 0.99: input should be less than",
    f"compress model -o model {_RECIPE}": "is or is inside model, which this run reads",
    f"compress other -o out {_RECIPE}": _UNSUPPORTED,
    "recover model -o out": "model: is not compressed",
    "recover other -o out": "other: is not compressed",
    "convert model -o out": "model: is not compressed",
    "convert model -o out --form two": "model: is not compressed",
    "convert model -o out --form rows": "--form: invalid choice: 'rows'",
    "convert model -o model": "is or is inside model, which this run reads",
    "convert other -o out": "other: is not compressed",
    "generate other --prompt Hi": _UNSUPPORTED,
    "generate bare --prompt Hi": "no usable tokenizer",
    "generate model --prompt Hi --backend abacus": "unknown backend 'abacus'",
    "generate model --prompt Hi --dtype fp7": "unknown dtype 'fp7'",
    "generate model --prompt Hi --temperature -1": "temperature is -1.0",
    "generate model --prompt Hi --temperature 1e-40": "temperature is 1e-40",
    "generate model --prompt Hi --repetition-penalty 1e-40": "repetition_penalty is 1e-40",
    "generate model --prompt Hi --max-new-tokens 0": "max_new_tokens is 0",
    "generate model --batch-file nowhere.jsonl": "nowhere.jsonl: no such file",
    f"benchmark other {_SHORT}": _UNSUPPORTED,
    f"benchmark model {_SHORT} --runs 0": "--runs has to be 1 to 10000",
    f"benchmark model {_SHORT} --runs 99999999999999999999": "--runs has to be 1 to 10000",
    f"benchmark model {_SHORT} --backend abacus": "unknown backend 'abacus'",
    f"benchmark model {_SHORT} --baseline other": "--baseline is for a compressed one",
    f"benchmark model {_SHORT} --batch 1000000000": "--batch has to be 1 to 4096",
    f"benchmark model {_SHORT} --batch 1,,2": "--batch: '1,,2': must be comma-separated numbers",
    f"benchmark model {_SHORT} --threads 100000": "--threads has to be 1 to",
    "evaluate model --text nowhere.txt": "nowhere.txt: no such file",
    "evaluate model --text a.txt --text b.txt": "--text: it takes one value, not both a.txt and b.txt",
    "evaluate other --text text.txt": _UNSUPPORTED,
    "evaluate other --text nowhere.txt": "nowhere.txt: no such file",
    "inspect other": _UNSUPPORTED,
    "report model": "model: is not compressed",
    "report other": _UNSUPPORTED,
    "report model -o model/page.html": "is or is inside model, which this run reads",
    **{f"{verb} model -o ~nouser/x": _NO_USER for verb in ("compress", "recover", "convert")},
    "sweep model -o out --text ~nouser/x": _NO_USER,
    "sweep model -o out --text nowhere.txt --ratios \N{SUPERSCRIPT TWO}": "must be comma-separated numbers",
    "sweep model -o out --text text.txt --ratios \N{SUPERSCRIPT TWO}": "must be comma-separated numbers",
    "tiling --mlp 4096,999999937,999999937,7": "sizes must be positive and at most 1048576",
    "tiling --shape 1,1,1,\N{SUPERSCRIPT TWO}": "must be positive numbers M,K,R,N",
    "tiling --shape ''": "--shape: '': must be positive numbers M,K,R,N",
    **{f"{verb} ~nouser/x -o out": _NO_USER for verb in ("compress", "recover", "convert")},
    "generate ~nouser/x --prompt Hi": _NO_USER,
    "evaluate ~nouser/x --text text.txt": _NO_USER,
    **{f"{verb} ~nouser/x": _NO_USER for verb in ("benchmark", "inspect", "report", "predict")},
}
"""Commands, and what their message has to say."""

GOOD_INPUT = [
    f"compress model -o out {_RECIPE}",
    "generate model --prompt Hi --max-new-tokens 2",
    f"benchmark model {_SHORT} --runs 1",
    "evaluate model --text text.txt",
]
"""The same commands without the mistake."""


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The current folder, with a model, the same without tokenizer, one that is not supported, a text, two recipes."""
    monkeypatch.chdir(tmp_path)
    make_tiny().save_pretrained(tmp_path / "bare")
    shutil.copytree(tmp_path / "bare", tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}')
    (tmp_path / "other" / "model.safetensors").touch()
    (tmp_path / "text.txt").write_text(" ".join(f"w{3 + n % 60}" for n in range(300)))
    (tmp_path / "recipe.yaml").write_text(
        "calibration: text.txt\ncalibration_rows: 8\ncalibration_length: 12\nalign: 2\nratio: 0.2\nrefine: 'off'\n"
    )
    (tmp_path / "wrong.yaml").write_text("ratio: 0.99\n")
    capsys.readouterr()
    return tmp_path


def status_of(words: list[str]) -> int:
    """Return the exit status of a command line, returned or raised."""
    try:
        return cli.main(words)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


@pytest.mark.parametrize(("command", "message"), BAD_INPUT.items(), ids=BAD_INPUT)
def test_bad_input_is_one_line_and_status_2(
    command: str, message: str, inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command)
    status = status_of(words)
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith(f"neuronmm {words[0]}: error: "), err
    assert message in err
    assert not (inputs / "out").exists()


@pytest.mark.parametrize("command", GOOD_INPUT)
def test_the_same_commands_without_the_mistake_work(command: str, inputs: Path) -> None:
    assert status_of(shlex.split(command)) == 0


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
