"""The verb ``recover``: the bytes that ``compress`` would write, interruption, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from compression_runs import config
from neuronmm import cli
from neuronmm.compression import factor_training
from neuronmm.compression.calibration import calibration_tokens
from neuronmm.compression.distillation import loss_sum
from neuronmm.compression.pipeline import compress
from neuronmm.compression.recover import recover
from neuronmm.compression.run import Run
from neuronmm.models import UserError
from neuronmm.models.contents import weight_files

pytestmark = pytest.mark.usefixtures("fast_learning")

TIMES = ("seconds", "resumed_seconds", "peak_rss_bytes")


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint, except for the reports, which contain times."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith("compression_report")}


def without_times(report: Any) -> Any:
    if isinstance(report, list):
        return [without_times(value) for value in report]
    if not isinstance(report, dict):
        return report
    return {key: without_times(value) for key, value in report.items() if key not in TIMES}


@pytest.fixture
def low(dense: Callable[..., Path], text: Path, tmp_path: Path) -> Path:
    """A compressed checkpoint of several shards."""
    source = dense(dtype=torch.bfloat16, max_shard_size="20KB")
    compress(source, tmp_path / "low", config(method="whitened", calibration=str(text), calibration_rows=24))
    return tmp_path / "low"


@pytest.mark.parametrize("source", ["self", "text"])
@pytest.mark.parametrize("stored", ["model", "int8"])
@pytest.mark.parametrize("train", ["factors", "lora"])
def test_it_writes_the_bytes_that_compress_would_write(
    train: Any, stored: Any, source: str, dense: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    # Of 96 rows 12 are held out. Of 24 rows it would be 3, and whether training helps these is chance: a text that the
    # model writes differs from processor to processor.
    usual = {"method": "whitened", "targets": "all", "share_a": "auto", "calibration_rows": 96, "seed": 3}
    usual["calibration"] = str(text) if source == "text" else source
    model = dense(tied=stored == "int8", dtype=torch.bfloat16, max_shard_size="20KB")
    whole, low, out = tmp_path / "whole", tmp_path / "low", tmp_path / "out"
    expected = compress(model, whole, config(**usual, recover=train, factor_dtype=stored))
    compress(model, low, config(**usual))
    before = contents(low)
    (low / "pytorch_model.bin").touch()
    (low / "modeling_own.py").touch()
    report = recover(low, out, train, factor_dtype=stored)
    assert contents(out) == contents(whole), "and neither pickles nor code"
    assert expected["recovery"]["kept"], "nothing was changed, so nothing is tested"
    assert json.loads((out / "compression_report.json").read_text()) == report
    assert without_times(report) == without_times(expected)
    assert {name: data for name, data in contents(low).items() if name in before} == before
    assert not (tmp_path / "out.partial").exists()


def test_time_and_memory_include_the_compression(low: Path, tmp_path: Path) -> None:
    file = low / "compression_report.json"
    before = json.loads(file.read_text())
    file.write_text(json.dumps({**before, "seconds": 1e6, "peak_rss_bytes": 1 << 60}))
    report = recover(low, tmp_path / "out")
    assert 1e6 < report["seconds"] < 1e6 + 1000 and report["peak_rss_bytes"] == 1 << 60
    assert before["bytes"] == report["bytes"], "the dense model's and the compressed one's"
    table = (tmp_path / "out" / "compression_report.md").read_text()
    assert "recovery of the factors" in table and "nats per token from the dense model" in table


def test_another_text_can_be_given(low: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(" ".join(f"w{3 + i % 61}" for i in range(500)))
    recover(low, tmp_path / "same")
    report = recover(low, tmp_path / "out", calibration=str(other), calibration_rows=9, calibration_length=7)
    assert report["recovery"]["text"] == str(other)
    assert report["recovery"]["rows"] == {"trained": 7, "held_out": 2, "length": 7}
    assert report["calibration"] == json.loads((low / "compression_report.json").read_text())["calibration"]
    assert report["fidelity"]["text"] == str(other)
    assert f"held-out tokens of {other}" in (tmp_path / "out" / "compression_report.md").read_text()
    assert "held-out tokens of" not in (tmp_path / "same" / "compression_report.md").read_text()
    assert contents(tmp_path / "out") != contents(tmp_path / "same")


def test_a_file_that_has_changed_is_refused_unless_it_is_named(low: Path, text: Path, tmp_path: Path) -> None:
    text.write_text(text.read_text() + " w7 w8")
    with pytest.raises(
        UserError, match=r"calibration\.txt: has changed since .*low was calibrated on it; name the texts"
    ):
        recover(low, tmp_path / "out")
    recover(low, tmp_path / "out", calibration=str(text))


def test_a_dense_model_that_has_changed_is_refused_unless_it_is_named(low: Path, tmp_path: Path) -> None:
    made = json.loads((low / "compression_report.json").read_text())
    file = weight_files(Path(made["model"]))["model.norm.weight"]
    tensors = load_file(file)
    tensors["model.norm.weight"] *= 2  # a model that was trained further has the same sizes
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"no more those that .*low was made from; give the dense model"):
        recover(low, tmp_path / "out")
    report = recover(low, tmp_path / "out", dense=made["model"])
    assert report["content_of_model"] != made["content_of_model"]


def test_a_shipped_text_that_has_changed_is_said_so(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shipped(word: str) -> list[str]:
        return [" ".join(f"w{3 + i % 61}" for i in range(400))]

    for module in ("calibration", "identity"):
        monkeypatch.setattr(f"neuronmm.compression.{module}.shipped_documents", shipped)
    compress(dense(), tmp_path / "low", config(method="whitened", calibration="prose", calibration_rows=24))
    recover(tmp_path / "low", tmp_path / "same")
    assert "has changed" not in capsys.readouterr().err
    monkeypatch.setattr("neuronmm.compression.identity.shipped_documents", lambda word: ["another release's"])
    recover(tmp_path / "low", tmp_path / "out")
    assert "prose: has changed since" in capsys.readouterr().err


def test_of_several_texts_it_takes_the_rows_of_the_compression(
    dense: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the two fills only some of the rows that it is asked for."""
    short, low, seen = tmp_path / "short.txt", tmp_path / "low", []

    def watched(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(torch.cat(calibration_tokens(run)))
        return calibration_tokens(run)

    for module in ("pipeline", "recover"):
        monkeypatch.setattr(f"neuronmm.compression.{module}.calibration_tokens", watched)
    short.write_text(" ".join(f"w{3 + i % 61}" for i in range(40)))
    texts = config(method="whitened", calibration=[str(short), str(text)], calibration_rows=24, calibration_length=8)
    found = compress(dense(), low, texts)["calibration"]
    assert found["asked_rows"] == 24 > found["rows"]
    recover(low, tmp_path / "better")
    assert torch.equal(*seen)


def test_a_text_of_one_row_is_refused_before_anything_is_trained(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tmp_path / "short.txt"
    short.write_text(" ".join(f"w{3 + i}" for i in range(20)))
    settings = config(method="whitened", recover="factors", calibration=str(short))
    monkeypatch.setattr("neuronmm.compression.pipeline.compress_layer", Mock(side_effect=AssertionError))
    with pytest.raises(UserError, match="two or more calibration rows, not 1; calibrate on more"):
        compress(dense(), tmp_path / "out", settings)


@pytest.mark.parametrize("steps", range(3))
def test_an_interrupted_run_resumes_to_the_same_bytes(
    steps: int, low: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    expected = recover(low, whole)
    step = Mock(wraps=loss_sum)

    def interrupted(*arguments: Any) -> float:
        if step.call_count == steps:
            raise KeyboardInterrupt
        return step(*arguments)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(factor_training, "loss_sum", interrupted)
        patched.setattr(
            factor_training, "replace_tensors", Mock(side_effect=KeyboardInterrupt)
        )  # after the very last pass
        recover(low, out)
    assert not out.exists() and (tmp_path / "out.partial").exists()
    with pytest.raises(UserError, match="--resume continues it"):
        recover(low, out)
    with pytest.raises(UserError, match="another recover"):
        recover(low, out, "lora", resume=True)
    step.reset_mock()
    monkeypatch.setattr(factor_training, "loss_sum", step)
    report = recover(low, out, resume=True)
    assert contents(out) == contents(whole) and step.call_count == 2 - steps
    assert without_times(report) == without_times(expected)
    assert report["seconds"] > report["recovery"]["resumed_seconds"]


def test_training_without_gain_is_reported_and_can_be_repeated(
    low: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(
            factor_training, "round_stochastically", lambda values, dtype, generator: -10 * values.to(dtype)
        )
        recover(low, out)
    assert contents(out) == contents(low)
    assert "on held-out rows: no gain" in (out / "compression_report.md").read_text()
    recover(out, tmp_path / "again")
    recover(low, tmp_path / "first")
    assert contents(tmp_path / "again") == contents(tmp_path / "first")
    assert "no gain" not in (tmp_path / "again" / "compression_report.md").read_text()


def test_an_existing_out_stays_until_its_replacement_is_complete(
    low: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, out = contents(low), tmp_path / "out"
    shutil.copytree(low, out)
    with pytest.raises(UserError, match="exists already"):
        recover(low, out)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(factor_training, "replace_tensors", Mock(side_effect=KeyboardInterrupt))
        recover(low, out, force=True)
    assert contents(out) == before
    recover(low, out, force=True)
    assert contents(out) != before == contents(low)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.txt", "dense-llama", "low", "out"]


def test_what_cannot_be_recovered_is_refused(low: Path, text: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "dense-llama", tmp_path / "out"

    def refused(folder: Path, match: str, **more: Any) -> None:
        with pytest.raises(UserError, match=match):
            recover(folder, out, **more)
        assert not out.exists() and not (tmp_path / "out.partial").exists()

    refused(model, "is not compressed")
    refused(low, "is compressed or quantised itself; give the dense model with --dense", dense=low)
    refused(low, "no such calibration file", calibration=str(tmp_path / "absent.txt"))
    refused(low, "calibration_length = 1", calibration_length=1)
    refused(low, "calibration_rows = 0", calibration_rows=0)
    refused(low, "calibration_rows 1: recovery trains on one row", calibration_rows=1)
    int8, again, smaller = tmp_path / "int8", tmp_path / "again", tmp_path / "smaller"
    compress(model, int8, config(method="svd", factor_dtype="int8"))
    refused(int8, "int8 factors cannot be trained")
    recover(low, again)
    refused(again, "recovered already")
    shutil.copytree(model, smaller)
    content = json.loads((model / "config.json").read_text())
    (smaller / "config.json").write_text(json.dumps({**content, "vocab_size": 60}))
    refused(low, r"is not what .* was made from \(vocab_size 60, not 64\)", dense=smaller)
    report = json.loads((low / "compression_report.json").read_text())
    shutil.move(model, tmp_path / "elsewhere")
    refused(low, "dense-llama.*; give the dense model with --dense")
    measured = recover(low, out, dense=tmp_path / "elsewhere")
    assert measured["model"] == str(tmp_path / "elsewhere"), "the report names the model that it was compared with"
    shutil.rmtree(out)
    for content in ("{}", "[]", "no JSON", json.dumps({**report, "matrices": [1]}), json.dumps({**report, "bytes": 1})):
        (low / "compression_report.json").write_text(content)
        refused(low, "compression_report.json: missing or unreadable")
    (low / "compression_report.json").unlink()
    refused(low, "compression_report.json: missing or unreadable")


def test_the_command_writes_the_checkpoint_and_prints_the_report(
    low: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["recover", str(low), "-o", str(out), "--train", "lora", "--factor-dtype", "int8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((out / "compression_report.json").read_text())
    assert report["recover"] == "lora" and report["factor_dtype"] == "int8"
    assert cli.main(["recover", str(low), "-o", str(tmp_path / "table")]) == 0
    assert "whitened + recovery of the factors" in capsys.readouterr().out
