"""Perplexity and multiple choice against a plain computation on transformers' logits."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from neuronmm.measure import evaluate as evaluation
from neuronmm.measure.evaluate import evaluate
from neuronmm.measure.perplexity import cut, read_text
from neuronmm.measure.statistics import estimate
from neuronmm.measure.tasks import encode, read_task
from neuronmm.models import UserError
from tiny_models import load_plain, shared_spec

TEXT = " ".join(f"w{3 + (i * i + 5 * i) % 61}" for i in range(150))


def nats(model: Any, ids: list[int], first: int) -> list[float]:
    """Return -log p of each of ``ids[first:]`` given all tokens before it, from one plain forward pass."""
    with torch.no_grad():
        logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [-logs[i - 1, ids[i]].item() for i in range(first, len(ids))]


def value(result: dict[str, Any], measure: str, model: str = "model") -> dict[str, float]:
    """Return the estimate of one measure for one model."""
    (row,) = [row for row in result["results"] if row["measure"] == measure]
    return row["difference"] if model == "difference" else row["models"][model]


@pytest.mark.parametrize(("context", "stride", "windows"), [(32, None, 4), (32, 16, 8), (50, 7, 15)])
def test_perplexity(
    checkpoint: Callable[..., Path], tmp_path: Path, context: int, stride: int | None, windows: int
) -> None:
    folder, file = checkpoint(), tmp_path / "text.txt"
    file.write_text(TEXT)
    result = evaluate(folder, text=file, context=context, stride=stride, dtype="fp32")
    model, ids = load_plain(folder), [int(word[1:]) for word in TEXT.split()]
    step = stride or context
    first = 1 if stride is None else context - stride
    means = []
    for start in range(0, len(ids) - context + 1, step):
        window = nats(model, ids[start : start + context], first)
        means.append(math.fsum(window) / len(window))
    assert len(means) == windows == result["text"]["windows"]
    assert result["text"]["nats_per_token_by_window"]["model"] == pytest.approx(means, rel=1e-4)
    expected = math.exp(sum(means) / windows)
    entry = value(result, "perplexity")
    assert entry["value"] == pytest.approx(expected, rel=1e-4)
    assert entry["standard_error"] == pytest.approx(expected * stdev(means) / math.sqrt(windows), rel=1e-3)
    assert result["text"]["scored_tokens"] == windows * (context - first)
    assert (result["text"]["context"], result["text"]["stride"]) == (context, step)


def test_default_window_is_the_models_maximum_and_short_texts_are_one_window(
    checkpoint: Callable[..., Path], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    assert cut(tokenizer, TEXT, 128).context == 128
    assert cut(tokenizer, TEXT * 30, 8192).context == 2048
    file = tmp_path / "text.txt"
    file.write_text("w3 w4 w5 w6")
    result = evaluate(checkpoint(), text=file, dtype="fp32")
    assert result["text"] == {
        "file": str(file),
        "context": 4,
        "stride": 4,
        "windows": 1,
        "scored_tokens": 3,
        "text_tokens": 4,
        "nats_per_token_by_window": {"model": [value(result, "nats per token")["value"]]},
    }
    assert value(result, "perplexity")["standard_error"] is None


def test_paired_difference(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    model, baseline = checkpoint(compressed=True), checkpoint(compressed=False)
    result = evaluate(model, baseline, text=file, context=16, dtype="fp32")
    ids = [int(word[1:]) for word in TEXT.split()]
    windows = [ids[start : start + 16] for start in range(0, len(ids) - 15, 16)]
    ours, theirs = (
        [math.fsum(nats(m, window, 1)) / 15 for window in windows] for m in (load_plain(model), load_plain(baseline))
    )
    by_window = result["text"]["nats_per_token_by_window"]
    assert by_window == {"model": pytest.approx(ours, rel=1e-4), "baseline": pytest.approx(theirs, rel=1e-4)}
    expected = estimate([a - b for a, b in zip(ours, theirs, strict=True)])
    entry = value(result, "nats per token", "difference")
    assert entry["value"] == pytest.approx(expected.value, rel=1e-3, abs=1e-5)
    assert entry["standard_error"] == pytest.approx(expected.standard_error, rel=1e-3)
    difference = value(result, "perplexity")["value"] - value(result, "perplexity", "baseline")["value"]
    assert value(result, "perplexity", "difference")["value"] == pytest.approx(difference)
    itself = evaluate(model, model, text=file, context=16, dtype="fp32")
    assert value(itself, "perplexity", "difference") == {"value": 0.0, "standard_error": 0.0}


def test_the_dtype_names_int8_factors(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    int8, dense = checkpoint(spec=shared_spec(factors="int8")), checkpoint(compressed=False)
    models = evaluate(int8, dense, text=file, context=16, dtype="fp32")["models"]
    assert {name: model["dtype"] for name, model in models.items()} == {
        "model": "float32, int8 factors",
        "baseline": "float32",
    }


def test_multiple_choice(checkpoint: Callable[..., Path], choice_task: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (file, rows) = checkpoint(), choice_task
    result = evaluate(folder, tasks=[file], dtype="fp32")
    model = load_plain(folder)
    plain, normed = [], []
    for row in rows:
        query = [int(word[1:]) for word in row["query"].split()]
        scores = [
            -math.fsum(nats(model, query + [int(word[1:]) for word in choice.split()], len(query)))
            for choice in row["choices"]
        ]
        plain.append(scores.index(max(scores)) == row["gold"])
        by_length = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
        normed.append(by_length.index(max(by_length)) == row["gold"])
    assert plain != normed, "the rows do not distinguish the metrics"
    for metric, correct in (("acc", plain), ("acc_norm", normed)):
        share = sum(correct) / 12
        assert value(result, f"task {metric}")["value"] == pytest.approx(share)
        assert value(result, f"task {metric}")["standard_error"] == pytest.approx(math.sqrt(share * (1 - share) / 11))
    assert evaluate(folder, tasks=[file], limit=5, dtype="fp32")["tasks"] == {"task": 5}


def test_the_result_states_the_accuracy_of_guessing_for_each_task(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [
        {"query": "w3", "choices": ["w4", "w5"], "gold": 0},
        {"query": "w6", "choices": ["w7", "w8", "w9", "w10"], "gold": 1},
    ]
    mixed, four = tmp_path / "mixed.jsonl", tmp_path / "four.jsonl"
    mixed.write_text("\n".join(map(json.dumps, rows)))
    four.write_text(json.dumps(rows[1]))
    result = evaluate(checkpoint(), tasks=[mixed, four], dtype="fp32")
    assert result["guessing"] == {"mixed": 0.375, "four": 0.25}
    assert "guessing gives mixed 37.5%, four 25.0%" in result["notes"]


def test_each_choice_replaces_a_blank_and_the_text_after_it_is_scored(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    file = tmp_path / "task.jsonl"
    rows = [
        {"query": "w3 _ w4 w5", "choices": ["w6", "w7"], "gold": 0},
        {"query": "w3 ___ w4", "choices": ["w6", "w7"], "gold": 1},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    blank, plain = read_task(file, None)
    assert blank.pairs == [("w3 w6", " w4 w5"), ("w3 w7", " w4 w5")]
    assert blank.lengths == [6, 6]
    assert plain.pairs == [("w3 ___ w4", " w6"), ("w3 ___ w4", " w7")]
    choice = encode(tokenizer, blank, context=128)[1]
    assert (choice.ids, choice.scored) == ([3, 7, 4, 5], 2)
    assert encode(tokenizer, blank, context=3)[1].ids == [7, 4, 5]


def test_progress_has_one_stage_per_measure_and_model(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    text, task = tmp_path / "text.txt", tmp_path / "task.jsonl"
    text.write_text(TEXT)
    task.write_text('{"query": "w3", "choices": ["w4", "w5"], "gold": 0}\n' * 3)
    fractions: dict[str, float] = {}

    def progress(stage: str, fraction: float) -> None:
        fractions[stage] = fractions.get(stage, 0) + fraction

    evaluate(checkpoint(), checkpoint(compressed=False), text=text, tasks=[task], context=16, progress=progress)
    assert list(fractions) == ["baseline: perplexity", "baseline: task", "model: perplexity", "model: task"]
    assert list(fractions.values()) == pytest.approx([1] * 4)


def test_text_files(tmp_path: Path) -> None:
    lines = tmp_path / "text.jsonl"
    lines.write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert read_text(lines) == "one\n\ntwo"
    for content in ('{"txt": "one"}', "no json", "[1]"):
        lines.write_text(content)
        with pytest.raises(UserError, match=r'text.jsonl:1: .*; a row has to be {"text": "..."}'):
            read_text(lines)
    with pytest.raises(UserError, match="no such file"):
        read_text(tmp_path / "none")
    lines.write_text("")
    with pytest.raises(UserError, match="no text"):
        read_text(lines)


@pytest.mark.parametrize(
    "row",
    [
        "no json",
        '{"query": "q", "choices": ["a", "b"]}',
        '{"query": "q", "choices": ["a", "b"], "gold": 2}',
        '{"query": "q", "choices": ["a"], "gold": 0}',
        '{"query": "q", "choices": ["a", ""], "gold": 0}',
    ],
)
def test_the_error_names_the_line_of_a_malformed_row(tmp_path: Path, row: str) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text('{"query": "q", "choices": ["a", "b"], "gold": 0}\n' + row)
    with pytest.raises(UserError, match=r"task.jsonl:2: .*; a row has to be"):
        read_task(file, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing to measure"),
        ({"context": 129}, "model's maximum of 128"),
        ({"context": 1}, "between 2 and"),
        ({"context": 8, "stride": 9}, "between 1 and the context of 8"),
        ({"limit": 0}, "--limit"),
    ],
)
def test_values_out_of_range(
    checkpoint: Callable[..., Path], tmp_path: Path, arguments: dict[str, int], message: str
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    with pytest.raises(UserError, match=message):
        evaluate(checkpoint(), text=file if arguments else None, **arguments)


@pytest.mark.parametrize("option", ["context", "stride"])
def test_windows_without_a_text_are_refused(
    checkpoint: Callable[..., Path], choice_task: tuple[Path, list[dict[str, Any]]], option: str
) -> None:
    with pytest.raises(UserError, match="--context and --stride are for --text"):
        evaluate(checkpoint(), tasks=[choice_task[0]], **{option: 8})


def test_models_whose_windows_differ_are_told_the_context(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same number of windows of the same text, but other tokens before the scored ones."""
    file, model, short = tmp_path / "text.txt", checkpoint(compressed=False), tmp_path / "short"
    shutil.copytree(model, short)
    file.write_text(TEXT)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    monkeypatch.setattr(evaluation, "_score", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=r"windows of 128 tokens and .* of 100; give --context 100 or less"):
        evaluate(model, short, text=file, dtype="fp32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "fp7"}, "unknown dtype"),
        ({"weight_dtype": "int7"}, "int7"),
        ({"backend": "neuron"}, "evaluate runs on cpu and cuda"),
        ({"model": "absent"}, "absent"),
    ],
)
def test_mistakes_are_found_before_the_baseline_is_scored(
    change: dict[str, str],
    message: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, dense = tmp_path / "text.txt", checkpoint(compressed=False)
    file.write_text(TEXT)
    arguments = {"model": checkpoint(), "baseline": dense, "text": file, **change}
    monkeypatch.setattr(evaluation, "window_nlls", lambda *_: pytest.fail("a model was scored"))
    with pytest.raises(UserError, match=message):
        evaluate(**arguments)


def test_two_tasks_of_one_name_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    with pytest.raises(UserError, match=r"task.jsonl, .*more/task.jsonl: .*rename one"):
        evaluate(checkpoint(), tasks=[tmp_path / "task.jsonl", tmp_path / "more" / "task.jsonl"])
    (tmp_path / "task.jsonl").write_text('{"query": "w3", "choices": ["w4", "w5"], "gold": 0}')
    assert evaluate(checkpoint(), tasks=[tmp_path / "task.jsonl"] * 2)["tasks"] == {"task": 1}, "one file twice"


def test_a_row_that_does_not_fit_the_context_is_named(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    task = tmp_path / "task.jsonl"
    rows = [
        {"query": "w3", "choices": ["w4", "w5"], "gold": 0},
        {"query": "w3", "choices": ["w4 " * 200, "w5"], "gold": 0},
    ]
    task.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=r"task.jsonl:2: cannot be scored .*; change or remove that row"):
        evaluate(checkpoint(), tasks=[task])


def test_both_models_run_on_the_backend_that_has_the_options(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paired difference would have the two backends' rounding in it."""
    file, dense = tmp_path / "text.txt", checkpoint(compressed=False)
    file.write_text(TEXT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = evaluate(dense, dense, text=file, context=16, dtype="fp32", weight_dtype="int8")["settings"]
    assert settings["backend"] == "cpu"
