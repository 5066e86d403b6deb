"""Old names of settings: they still work, with one line on stderr, wherever a user may have written them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compression_runs import config, weights
from neuronmm import cli
from neuronmm.compression import report
from neuronmm.compression.config import CompressionConfig, _note_renamed
from neuronmm.compression.pipeline import compress
from neuronmm.compression.recover import recover
from neuronmm.compression.workspace import RUN
from neuronmm.measure.sweep_config import parse_method
from neuronmm.models import UserError

NOTICES = [
    "neuronmm: the setting share is now named share_a; the old name still works",
    "neuronmm: the setting factors is now named factor_dtype; the old name still works",
]


@pytest.fixture(autouse=True)
def _first_notice() -> Iterator[None]:
    """Each test is a process that has printed no notice yet."""
    _note_renamed.cache_clear()
    yield
    _note_renamed.cache_clear()


def notices(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the notices printed since the last call."""
    return [line for line in capsys.readouterr().err.splitlines() if "is now named" in line]


def test_a_recipe_and_keyword_arguments_may_use_the_old_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "old.yaml"
    recipe.write_text('share: "off"\nfactors: int8\n')
    built = CompressionConfig.build(recipe)
    assert (built.share_a, built.factor_dtype) == ("off", "int8")
    assert notices(capsys) == NOTICES
    assert CompressionConfig(share="off", factors="int8") == built  # type: ignore[call-arg]
    assert CompressionConfig.build(recipe, share_a="auto", factors="model") == CompressionConfig()
    assert notices(capsys) == [], "once per process"


def test_a_setting_with_both_names_is_refused() -> None:
    with pytest.raises(UserError, match="share, share_a: are the same setting; give share_a alone"):
        CompressionConfig.build(share="off", share_a="off")


def test_the_old_options_work_and_the_help_does_not_show_them(
    dense: Callable[..., Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--calibration", str(text), "--recipe", str(tmp_path / "small.yaml"), "--json"]
    (tmp_path / "small.yaml").write_text('calibration_rows: 6\ncalibration_length: 12\nalign: 2\nrefine: "off"\n')
    source = str(dense())
    for name, words in (
        ("old", ["--share", "off", "--factors", "int8"]),
        ("new", ["--share-a", "off", "--factor-dtype", "int8"]),
    ):
        assert cli.main(["compress", source, "-o", str(tmp_path / name), *run, *words]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["share_a"] == "off" and json.loads(out)["factor_dtype"] == "int8"
        assert [line for line in err.splitlines() if "is now named" in line] == (NOTICES if name == "old" else [])
    assert weights(tmp_path / "old") == weights(tmp_path / "new")
    for verb in ("compress", "recover"):
        with pytest.raises(SystemExit):
            cli.main([verb, "--help"])
        shown = capsys.readouterr().out
        assert "--factor-dtype" in shown and "--factors" not in shown and "--share " not in shown


def test_recover_takes_the_old_keyword_and_reads_an_older_report(
    dense: Callable[..., Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low = tmp_path / "low"
    compress(dense(), low, config(method="whitened", calibration=str(text), calibration_rows=12))
    older = json.loads((low / report.REPORT).read_text())
    older["share"], older["factors"] = older.pop("share_a"), older.pop("factor_dtype")
    (low / report.REPORT).write_text(json.dumps(older))
    assert notices(capsys) == []
    done = recover(low, tmp_path / "out", factors="int8")  # type: ignore[call-arg]
    assert notices(capsys) == NOTICES[1:]
    assert (done["share_a"], done["factor_dtype"]) == ("off", "int8") and not {"share", "factors"} & done.keys()
    assert report.read(tmp_path / "out") == done


def test_an_interrupted_run_with_old_names_resumes(dense: Callable[..., Path], tmp_path: Path) -> None:
    source, out = dense(), tmp_path / "out"

    def stop(stage: str, fraction: float) -> None:
        if stage == "compressing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(source, out, config(), progress=stop)
    file = tmp_path / "out.partial" / RUN
    older = json.loads(file.read_text())
    older["share"], older["factors"] = older.pop("share_a"), older.pop("factor_dtype")
    file.write_text(json.dumps(older))
    compress(source, out, config(), resume=True)
    assert out.exists()


def test_the_word_of_a_sweep_keeps_its_old_name() -> None:
    assert parse_method("whitened+share") == parse_method("whitened+share_a")
