"""The benchmark of drafts: a complete document, both tables, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from core_decoding import needs_core
from neuronmm.cli import main
from neuronmm.engine import speculation
from neuronmm.engine.draft_length import DraftLength
from neuronmm.measure import draft_benchmark
from neuronmm.measure.benchmark import benchmark, run_benchmark
from neuronmm.measure.config import BenchmarkConfig

pytestmark = needs_core
ARGUMENTS = ["--new-tokens", "12", "--runs", "2", "--dtype", "fp32"]


def test_document_and_tables(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the model as its own draft, in steps of up to four tokens, every draft is accepted."""
    monkeypatch.setattr(DraftLength, "choose", lambda self, most, *_: min(most, 3))
    folder, results = str(checkpoint()), tmp_path / "results"
    results.mkdir()
    for name, content in (("benchmark.json", '{"what": "benchmark"}'), ("benchmark.png", "of an earlier benchmark")):
        (results / name).write_text(content)
    assert main(["benchmark", folder, "--draft", folder, *ARGUMENTS, "--output", str(results)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert json.loads((results / "benchmark.json").read_text()) == document
    assert not (results / "benchmark.png").exists(), "it shows other figures"
    assert document["kind"] == "measured" and document["draft"] == folder
    assert [step["drafted"] for step in document["steps"]] == list(range(1, 8))
    single = {step["seconds"] / (1 + step["break_even"]) for step in document["steps"]}
    assert max(single) == pytest.approx(min(single))
    assert list(document["prompts"]) == ["chat", "code", "free text"]
    for figures in document["prompts"].values():
        assert figures["accepted"] == figures["drafted"] == 2 * 8 and figures["acceptance"] == 1
        assert figures["steps"] == 2 * 3 and figures["tokens_per_step"] == pytest.approx(11 / 3)
        assert 0 < figures["speedup"]["min"] <= figures["speedup"]["median"]
    text = "\n".join(table)
    assert all(word in text for word in ("speedup", "100% of 16", "pays from accepted tokens", "equal, token by token"))


def test_the_progress_of_a_prompt_adds_up(checkpoint: Callable[..., Path]) -> None:
    done: dict[str, list[float]] = {}
    config = BenchmarkConfig(checkpoint(), draft="ngram", new_tokens=12, runs=2)
    run_benchmark(config, progress=lambda stage, fraction: done.setdefault(stage, []).append(fraction))
    assert all(done[prompt] == [0.0, *[pytest.approx(1 / 3)] * 3] for prompt in draft_benchmark.PROMPTS)


def test_a_text_that_differs_is_an_error(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_benchmark, "PROMPTS", {"one": ("w9 w10", False)})
    honest = speculation.run

    def wrong(decoder, row, *arguments):  # type: ignore[no-untyped-def]
        yield from honest(decoder, row, *arguments)
        row.result.token_ids[-1] += 1

    monkeypatch.setattr(speculation, "run", wrong)
    with pytest.raises(RuntimeError, match="differs from the plain one"):
        benchmark(checkpoint(), draft="ngram", new_tokens=12, runs=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--baseline", "x"], "--baseline"),
        (["--batch", "1,4"], "--batch"),
        (["--new-tokens", "100"], "lower --new-tokens"),
        (["--backend", "neuron"], "--backend cpu"),
    ],
)
def test_what_it_refuses(
    checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    arguments = ["benchmark", str(checkpoint()), "--draft", "ngram", *ARGUMENTS, *options]
    capsys.readouterr()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
