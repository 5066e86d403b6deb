"""A tokenizer whose regular expression needs exponential time makes the package tokenizers panic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from neuronmm.cli import main
from neuronmm.engine.engine import load
from neuronmm.models import UserError
from neuronmm.models.errors import without_panics


@pytest.fixture
def hostile(checkpoint: Callable[..., Path]) -> Path:
    """A dense model whose tokenizer tries all ways to divide a row of the letter x."""
    folder = checkpoint(compressed=False)
    content = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = split
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_a_panic_is_a_user_error(hostile: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"does not work on this text .*retry-limit"):
        load(hostile).encode("x" * 40)
    capfd.readouterr()  # Rust reports the panic by itself
    text = hostile.parent / "text.txt"
    text.write_text("x" * 4000)
    for words in (["generate", str(hostile), "--prompt", "x" * 40], ["evaluate", str(hostile), "--text", str(text)]):
        assert main(words) == 2
        out, err = capfd.readouterr()
        assert out == "" and "Traceback" not in err
        assert err.rstrip("\n").split("\n")[-1].startswith(f"neuronmm {words[0]}: error: the model's tokenizer")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_other_errors_pass(error: type[BaseException]) -> None:
    with pytest.raises(error), without_panics():
        raise error
