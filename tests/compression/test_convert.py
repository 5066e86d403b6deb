"""The verb convert: the same function in the other form; what the report says of it; interruption, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from compression_runs import config, edit_tensors, snapshot, tensors, weights
from neuronmm import cli
from neuronmm.compression import convert as module
from neuronmm.compression.convert import convert
from neuronmm.compression.pipeline import compress
from neuronmm.compression.recover import recover
from neuronmm.compression.report import write
from neuronmm.kernels import Form
from neuronmm.models import LowRankLinear, UserError
from neuronmm.models.contents import inspect
from neuronmm.models.load import load_pretrained
from tiny_models import load_plain, make_tokens

FAMILIES = ("llama", "qwen2", "qwen3")


def settings(**changes: Any) -> Any:
    return config(**{"method": "svd", "targets": "all", "form": "two", **changes})


@pytest.fixture
def two(dense: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint of two factors for every linear, in several shards."""
    compress(dense(max_shard_size="20KB"), tmp_path / "two", settings())
    return tmp_path / "two"


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_plain(folder)(make_tokens()).logits


def greedy(folder: Path) -> list[int]:
    return (
        load_plain(folder)
        .generate(make_tokens(1, 5), max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
        .tolist()
    )


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "compression_report.json").read_text())


@pytest.mark.parametrize("share_a", ["off", "auto"])
@pytest.mark.parametrize("targets", ["mlp", "attention", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_the_same_function(
    family: str, targets: str, share_a: str, dense: Callable[..., Path], tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("two", "pivoted", "back")]
    wanted = compress(dense(family), folders[0], settings(targets=targets, share_a=share_a))
    there = convert(folders[0], folders[1])
    back = convert(folders[1], folders[2], "two")
    specs = [inspect(folder).spec for folder in folders]
    assert [spec.format for spec in specs if spec is not None] == [1, 2, 1]
    one, other, last = map(logits, folders)
    torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, other, rtol=1e-4, atol=1e-4)
    assert greedy(folders[0]) == greedy(folders[1]) == greedy(folders[2])
    assert (there["form"], back["form"]) == ("pivoted", "two")
    sizes = [report["bytes"]["compressed"] for report in (wanted, there, back)]
    assert sizes[1] < sizes[0] and abs(sizes[2] - sizes[0]) < 1000, "the index costs less than it saves"
    assert back["parameters"] == wanted["parameters"] and back["realised_ratio"] == wanted["realised_ratio"]


def test_the_report_counts_the_parameters_that_are_stored(two: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before, report = report_of(two), convert(two, out)
    assert report == report_of(out)
    spec = inspect(out).spec
    assert spec is not None and spec.forms and spec.format == report["format"] == 2
    stored = sum(tensor.numel() for name, tensor in tensors(out).items() if not name.endswith(".pivots"))
    assert report["parameters"] == {"dense": before["parameters"]["dense"], "compressed": stored}
    assert report["realised_ratio"] == spec.realised_ratio > before["realised_ratio"]
    assert report["model_ratio"] == spec.model_ratio == pytest.approx(1 - stored / report["parameters"]["dense"])
    for matrix, old in zip(report["matrices"], before["matrices"], strict=True):
        rank, (outputs, inputs) = matrix["rank"], matrix["shape"]
        assert rank == old["rank"] and matrix["relative_error"] == old["relative_error"]
        assert matrix["kept_parameters"] == rank * (outputs + inputs - rank) == old["kept_parameters"] - rank**2
        assert matrix["realised_ratio"] == 1 - matrix["kept_parameters"] / matrix["dense_parameters"]
        assert matrix["pivot_condition"] >= 1 and old["pivot_condition"] is None
    assert report["bytes"]["dense"] == before["bytes"]["dense"]
    assert report["bytes"]["compressed"] < before["bytes"]["compressed"]
    assert report["seconds"] > before["seconds"]
    assert "svd + pivoted" in (out / "compression_report.md").read_text()


def test_two_factors_that_are_larger_than_the_linear_are_said_so(two: Path, tmp_path: Path) -> None:
    """Pivoted factors of a high rank save what two factors cost."""
    report = report_of(two)
    report |= {"realised_ratio": -0.25, "model_ratio": -0.125}
    write(report, two)
    assert "12.50% added" in (two / "compression_report.md").read_text()
    (two / "README.md").unlink()
    write(report, two)
    assert "Added: 25.00% of the targeted weights, 12.50% of the model." in (two / "README.md").read_text()


def test_the_distance_is_said_to_be_of_the_checkpoint_before(dense: Callable[..., Path], tmp_path: Path) -> None:
    report = compress(dense(), tmp_path / "two", settings(method="whitened"))
    assert report["conversions"] == [] and "converted_since" not in report["fidelity"]
    converted = convert(tmp_path / "two", tmp_path / "out")
    assert converted["conversions"] == [{"form": "two", "recovered": False}]
    assert converted["fidelity"] == {**report["fidelity"], "converted_since": True}
    assert ", before the form was changed" in (tmp_path / "out" / "compression_report.md").read_text()
    assert "Measured before the form of the factors was changed, on " in (tmp_path / "out" / "README.md").read_text()


def test_it_writes_the_form_that_compress_writes(dense: Callable[..., Path], tmp_path: Path) -> None:
    """The ranks of the one are the other's, so the factors are too, but for the rounding of those in between."""
    source = dense()
    compress(source, tmp_path / "pivoted", settings(form="pivoted"))
    convert(tmp_path / "pivoted", tmp_path / "two", "two")
    convert(tmp_path / "two", tmp_path / "again")
    torch.testing.assert_close(logits(tmp_path / "two"), logits(tmp_path / "pivoted"), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(tmp_path / "again"), logits(tmp_path / "pivoted"), rtol=1e-4, atol=1e-4)
    shapes = [{name: one.shape for name, one in tensors(tmp_path / name).items()} for name in ("pivoted", "again")]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_stays_that_of_the_checkpoint(dtype: torch.dtype, dense: Callable[..., Path], tmp_path: Path) -> None:
    compress(dense(dtype=dtype), tmp_path / "two", settings())
    convert(tmp_path / "two", tmp_path / "out")
    kinds = {name.rpartition(".")[2]: one.dtype for name, one in tensors(tmp_path / "out").items()}
    assert kinds == {"weight": dtype, "pivots": torch.int32}
    found, plain = (load_plain(tmp_path / name, dtype)(make_tokens()).logits.float() for name in ("out", "two"))
    exact = load_plain(tmp_path / "two")(make_tokens()).logits
    assert (found - exact).norm() <= 2 * (plain - exact).norm()


def test_a_partly_factorised_mlp_and_trained_norms_move_along(dense: Callable[..., Path], tmp_path: Path) -> None:
    """At uneven ranks some of an MLP's linears stay dense; they are put in the order of the others."""
    source, low = dense("qwen2"), tmp_path / "two"
    more = {"method": "whitened", "allocation": "global", "refine": "fast", "ratio": 0.1}
    report = compress(source, low, settings(**more, targets="mlp", align=8))
    assert {matrix["rank"] is None for matrix in report["matrices"]} == {True, False}
    convert(low, tmp_path / "out")
    torch.testing.assert_close(logits(tmp_path / "out"), logits(low), rtol=1e-4, atol=1e-4)
    convert(tmp_path / "out", tmp_path / "back", "two")
    torch.testing.assert_close(logits(tmp_path / "back"), logits(low), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stops", range(3))
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    stops: int, two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    convert(two, tmp_path / "whole")
    step = Mock(wraps=module._convert_layer)

    def interrupted(*arguments: Any) -> Any:
        if step.call_count == stops:
            raise KeyboardInterrupt
        return step(*arguments)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, "_convert_layer", interrupted)
        patched.setattr(module, "assemble", Mock(side_effect=KeyboardInterrupt))
        convert(two, out)
    assert not out.exists() and (tmp_path / "out.partial").exists() is (stops > 0)
    if stops:
        with pytest.raises(UserError, match="--resume continues it"):
            convert(two, out)
        shutil.copytree(two, tmp_path / "other")
        with pytest.raises(UserError, match="another model"):
            convert(tmp_path / "other", out, resume=True)
    step.reset_mock()
    monkeypatch.setattr(module, "_convert_layer", step)
    seen: list[tuple[str, float]] = []
    convert(two, out, resume=True, progress=lambda stage, fraction: seen.append((stage, fraction)))
    assert weights(out) == weights(tmp_path / "whole") and step.call_count == 2 - stops
    assert {stage for stage, _ in seen} == {"converting"} and sum(part for _, part in seen) == pytest.approx(1)
    assert not (tmp_path / "out.partial").exists()


def test_an_existing_out_stays_until_its_replacement_is_complete(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(two, out)
    before = snapshot(out)
    with pytest.raises(UserError, match="exists already"):
        convert(two, out)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, "assemble", Mock(side_effect=KeyboardInterrupt))
        convert(two, out, force=True)
    assert snapshot(out) == before
    convert(two, out, force=True)
    assert inspect(out).spec.forms


FLAGS = [{}, {"force": True}, {"resume": True}]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "plain")
def test_the_checkpoint_is_never_written_over(
    flags: dict[str, bool], two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(two)
    before = snapshot(two)
    for out in (two, two / "out", tmp_path / "link"):
        with pytest.raises(UserError, match="is or is inside"):
            convert(two, out, **flags)
    monkeypatch.chdir(two)
    with pytest.raises(UserError, match=r"current directory|is or is inside"):
        convert(".", ".", **flags)
    assert snapshot(two) == before


def test_what_cannot_be_converted_is_refused(two: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "dense-llama", tmp_path / "out"

    def refused(folder: Path, match: str, form: Any = "pivoted") -> None:
        with pytest.raises(UserError, match=match) as refusal:
            convert(folder, out, form)
        assert "\n" not in str(refusal.value)
        assert not out.exists() and not (tmp_path / "out.partial").exists()

    refused(model, "is not compressed, so it has no factors to convert; use compress --form pivoted")
    refused(two, "has the form two already", "two")
    convert(two, tmp_path / "pivoted")
    refused(tmp_path / "pivoted", "has the form pivoted already")
    for form, other in (("two", "pivoted"), ("pivoted", "two")):
        compress(model, tmp_path / f"int8-{form}", settings(form=form, factor_dtype="int8"))
        refused(tmp_path / f"int8-{form}", "int8 factors cannot be converted; convert the checkpoint", other)
    report = report_of(two)
    matrix = report["matrices"][0]
    broken = [{}, {**report, "matrices": [1]}]
    broken += [
        {**report, "matrices": [{**matrix, key: value}]}
        for key, value in (("dense_parameters", None), ("dense_parameters", 0), ("rank", "8"), ("shape", [1, 2, 3]))
    ]
    for content in broken:
        (two / "compression_report.json").write_text(json.dumps(content))
        refused(two, "compression_report.json: missing or unreadable")
    (two / "compression_report.json").write_text(json.dumps(report))
    shard = next(two.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    refused(two, "corrupt shard")


def test_weights_that_are_no_numbers_are_refused(dense: Callable[..., Path], tmp_path: Path) -> None:
    compress(dense(), tmp_path / "two", settings())
    name = "model.layers.1.mlp.up_proj.B.weight"
    edit_tensors(tmp_path / "two", lambda content: content[name][0].fill_(float("nan")))
    with pytest.raises(UserError, match=f"{name} holds NaN or infinity"):
        convert(tmp_path / "two", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pivots", [[0, 2, 1], [0, 2, 2], [-1, 2, 3], [0, 2, 99]], ids=str)
def test_hostile_pivots_are_refused(pivots: list[int], two: Path, tmp_path: Path) -> None:
    low = tmp_path / "low"
    convert(two, low)
    name = "model.layers.0.self_attn.q_proj.pivots"

    def change(content: dict[str, torch.Tensor]) -> None:
        content[name][: len(pivots)] = torch.tensor(pivots)

    edit_tensors(low, change)
    with pytest.raises(UserError, match=rf"{name} has to hold increasing numbers from 0 to 31") as refusal:
        convert(low, tmp_path / "out", "two")
    assert "\n" not in str(refusal.value)


@pytest.mark.usefixtures("fast_learning")
def test_a_recovered_checkpoint_is_converted_and_a_converted_one_recovered(
    dense: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    more = {"method": "whitened", "calibration": str(text), "calibration_rows": 24}
    compress(dense(), tmp_path / "low", settings(**more))
    recover(tmp_path / "low", tmp_path / "recovered")
    converted = convert(tmp_path / "recovered", tmp_path / "small")
    assert converted["recovery"]["kept"]
    torch.testing.assert_close(logits(tmp_path / "small"), logits(tmp_path / "recovered"), rtol=1e-4, atol=1e-4)
    convert(tmp_path / "low", tmp_path / "small-low")
    for train in ("factors", "lora"):
        report = recover(tmp_path / "small-low", tmp_path / train, train, factor_dtype="int8")
        assert report["form"] == "pivoted" and report["recovery"]["kept"]
        assert report["recovery"]["loss_after"] < report["recovery"]["loss_before"]
        model = load_pretrained(tmp_path / train, torch.float32)
        forms = {one.form for one in model.modules() if isinstance(one, LowRankLinear)}
        assert forms == {Form.ROWS, Form.COLUMNS}


def test_the_command_writes_it_and_prints_the_report(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["convert", str(two), "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report_of(out)
    assert cli.main(["convert", str(out), "-o", str(tmp_path / "back"), "--form", "two"]) == 0
    assert "weight files" in capsys.readouterr().out
    assert cli.main(["convert", str(out), "-o", str(tmp_path / "third")]) == 2
    assert "has the form pivoted already" in capsys.readouterr().err
