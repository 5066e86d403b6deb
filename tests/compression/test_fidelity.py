"""The comparison with the dense model that ends every compression: distance, samples, loops, warnings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import kl_div

from compression_runs import config, tensors
from neuronmm import cli
from neuronmm.compression import calibration, fidelity, report
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.fidelity import compare, loops
from neuronmm.compression.pipeline import compress
from neuronmm.compression.reader import Reader
from neuronmm.compression.recover import recover
from neuronmm.compression.report import summary
from neuronmm.models import FAMILIES, UserError
from neuronmm.models.load import load_pretrained
from neuronmm.models.progress import no_progress
from word_tokenizer import word_tokenizer


def run_on(dense: Path, progress: Any = no_progress) -> Any:
    settings = SimpleNamespace(budget=None, weight_dtype="model", factorises=True, calibration="a text")
    return SimpleNamespace(dense=Reader(dense), device="cpu", progress=progress, config=settings)


@pytest.mark.parametrize("settings", [{"form": "two"}, {"form": "pivoted"}, {"factor_dtype": "int8"}])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_distance_is_that_of_the_whole_models(
    model_type: str, settings: dict[str, str], dense: Callable[..., Path], tmp_path: Path
) -> None:
    source = dense(model_type, tied=model_type == "qwen2")
    report = compress(source, tmp_path / "out", config(targets="all", ratio=0.4, method="whitened", **settings))
    rows = torch.randint(3, 64, (3, 11))
    stages: list[float] = []
    result = compare(run_on(source, lambda _, fraction: stages.append(fraction)), tmp_path / "out", rows, rows[:1])
    assert sum(stages) == pytest.approx(1)

    with torch.no_grad():
        want = load_pretrained(source, torch.float32)(rows).logits[:, :-1].log_softmax(-1)
        got = load_pretrained(tmp_path / "out", torch.float32)(rows).logits[:, :-1].log_softmax(-1)
    each = kl_div(got, want, reduction="none", log_target=True).sum(-1).mean(1)
    distance = result["distance"]
    assert distance["kl"] == pytest.approx(float(each.mean()), rel=1e-3) and distance["kl"] > 1e-4
    assert distance["kl_standard_error"] == pytest.approx(float(each.std() / 3**0.5), rel=1e-2)
    assert distance["agreement"] == pytest.approx(float((want.argmax(-1) == got.argmax(-1)).double().mean()))
    held_out = report["fidelity"]["distance"]
    assert held_out["held_out"] and distance["held_out"]
    assert held_out["kl"] > 0 and held_out["length"] == report["calibration"]["length"]
    assert held_out["rows"] == -(-report["calibration"]["rows"] // 8)


def test_a_single_row_is_not_called_held_out(dense: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(f"w{3 + i % 60}" for i in range(20)))
    settings = config(method="whitened", ratio=0.4, calibration=str(tmp_path / "text.txt"))
    report = compress(dense(), tmp_path / "out", settings)
    assert report["calibration"]["rows"] == report["fidelity"]["distance"]["rows"] == 1
    assert not report["fidelity"]["distance"]["held_out"]
    rows = dict(summary(report))
    asked = report["calibration"]["asked_rows"]
    assert f"1 x 12 tokens (of {asked} rows asked)" in rows["calibration"]
    assert rows["distance from dense"].endswith("1 x 12 tokens that the factors were fitted to")
    assert "12 tokens, which the factors were fitted to, of the calibration" in (tmp_path / "out/README.md").read_text()
    budget = CompressionConfig(**settings.model_dump(exclude={"ratio", "budget"}), budget=1.0)
    with pytest.raises(UserError, match="the text has a single one; calibrate on more"):
        compress(dense(), tmp_path / "again", budget)


def test_a_model_is_at_no_distance_from_itself(dense: Callable[..., Path]) -> None:
    row = torch.randint(3, 64, (1, 9))
    result = compare(run_on(dense()), dense(), row, row.roll(1))
    distance = result["distance"]
    assert (distance["kl"], distance["agreement"], distance["kl_standard_error"]) == (0, 1, None)
    assert result["samples"] and all(sample["dense"] == sample["compressed"] for sample in result["samples"])
    assert result["warnings"] == []


def test_the_samples_are_the_greedy_text_of_both_models(
    dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "_NEW_TOKENS", 12)
    monkeypatch.setattr(fidelity, "_PROMPTS", ("w5 w6 w7", "w9"))
    source, tokenizer = dense("qwen3"), word_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}w3 {{ m.content }} w4{% endfor %}{% if add_generation_prompt %} w8{% endif %}"
    )
    tokenizer.save_pretrained(source)
    report = compress(source, tmp_path / "out", config(method="svd", ratio=0.4))
    for which, folder in (("dense", source), ("compressed", tmp_path / "out")):
        model = load_pretrained(folder, torch.float32)
        for sample in report["fidelity"]["samples"]:
            ids = tokenizer(f"w3 {sample['prompt']} w4 w8", return_tensors="pt")["input_ids"]
            new = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
            ends = {tokenizer.eos_token_id, model.config.eos_token_id}
            stop = next((n for n, token in enumerate(new.tolist()) if token in ends), 12)
            assert sample[which]["text"] == tokenizer.decode(new[:stop], skip_special_tokens=True)


def test_weights_without_a_tokenizer_are_compared_without_samples(dense: Callable[..., Path], tmp_path: Path) -> None:
    source = dense()
    for file in source.glob("*token*"):
        file.unlink()
    result = compress(source, tmp_path / "out", config(method="svd"))["fidelity"]
    assert (result["distance"], result["samples"], result["warnings"]) == (None, [], [])


def test_held_out_rows_do_not_change_the_checkpoint(
    dense: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dense()
    settings = config(method="whitened", refine="fast", allocation="global", calibration=str(text), calibration_rows=16)
    first = compress(source, tmp_path / "first", settings)
    inner = calibration.make_rows

    def other(run: Any) -> torch.Tensor:
        rows = inner(run)
        assert len(rows) == 18
        rows[-2:] = rows[-2:].flip(1)
        return rows

    monkeypatch.setattr(calibration, "make_rows", other)
    second = compress(source, tmp_path / "second", settings)
    before, after = tensors(tmp_path / "first"), tensors(tmp_path / "second")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert first["fidelity"]["distance"]["kl"] != second["fidelity"]["distance"]["kl"]


@given(
    start=st.lists(st.integers(0, 9), max_size=40),
    passage=st.lists(st.integers(10, 19), min_size=1, max_size=12),
    repeats=st.integers(1, 20),
)
def test_a_passage_that_is_repeated_to_the_end_is_a_loop(start: list[int], passage: list[int], repeats: int) -> None:
    tokens = start + passage * repeats
    if repeats >= 3 and len(passage) * repeats >= 16:
        assert loops(tokens)
    assert not loops([*tokens, 20])


def test_a_loop_has_three_turns_and_sixteen_tokens() -> None:
    assert not loops([7] * 15) and loops([7] * 16)
    assert not loops([7, 8, 9] * 5) and loops([7, 8, 9] * 6)
    assert not loops(list(range(8)) * 2) and loops(list(range(8)) * 3)


@given(st.permutations(range(60)))
def test_text_without_repetition_is_no_loop(tokens: list[int]) -> None:
    assert not loops(tokens)
    assert not loops(tokens + tokens)


@pytest.mark.parametrize("bad", ["far", "loops"])
def test_a_model_that_left_the_dense_one_gets_a_plain_warning(
    bad: str,
    dense: Callable[..., Path],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fidelity, "LARGEST_KL", {"far": 0.0, "loops": math.inf}[bad])
    if bad == "loops":
        texts = iter([("a b", False), ("c d", False), ("e", False), ("f f f", True)])
        monkeypatch.setattr(fidelity, "_text", lambda *_: next(texts))
    out = tmp_path / "out"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("calibration_rows: 8\ncalibration_length: 12\nrefine: 'off'\n")
    options = ["--recipe", str(recipe), "--calibration", str(text), "--json"]
    assert cli.main(["compress", str(dense()), "-o", str(out), *options]) == 0
    printed = capsys.readouterr()
    (warning,) = json.loads(printed.out)["fidelity"]["warnings"]
    assert f"neuronmm: warning: {warning}\n" in printed.err
    assert {"far": "far from the dense one", "loops": "repeats itself"}[bad] in warning
    document = (out / "compression_report.md").read_text()
    assert f"- **warning**: {warning}" in document and "distance from dense" in document
    assert "The compressed model" in document and ("(repeats itself)" in document) == (bad == "loops")


def test_a_distance_that_is_not_finite_leaves_a_readable_report(
    dense: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = {"rows": 1, "length": 12, "kl": math.nan, "kl_standard_error": math.nan, "agreement": 0.0}
    monkeypatch.setattr(fidelity, "_distance", lambda *_: dict(measured))
    out = tmp_path / "out"
    compress(dense(), out, config(method="whitened", calibration=str(text)))
    found = report.read(out)["fidelity"]
    assert found["distance"]["kl"] is None and "far from the dense one" in found["warnings"][0]
    recover(out, tmp_path / "trained")  # reads the report


def test_warnings_name_what_a_user_can_change(
    dense: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding has no ratio, and the factors that recovery trains keep the budget that they were made to."""
    monkeypatch.setattr(fidelity, "LARGEST_KL", 0.0)
    source, rows = dense(), {"calibration": str(text), "calibration_rows": 8, "calibration_length": 12}
    rounded = compress(source, tmp_path / "rounded", CompressionConfig(ratio=0, weight_dtype="int4", **rows))
    (warning,) = rounded["fidelity"]["warnings"]
    assert "keep more bits" in warning and "ratio" not in warning
    asked = config(method="whitened", calibration=str(text)).model_dump(exclude={"ratio"}) | {"budget": 50.0}
    compress(source, tmp_path / "low", CompressionConfig(**asked))
    document = tmp_path / "low" / report.REPORT
    content = json.loads(document.read_text())
    document.write_text(json.dumps(content | {"budget": 1e-9}))
    over, far = recover(tmp_path / "low", tmp_path / "trained")["fidelity"]["warnings"]
    assert "more than the budget of 1e-09" in over and "lower --budget" in far
