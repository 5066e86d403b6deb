"""The JSON documents of the measuring commands keep their keys, in their order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neuronmm.cli import main


def shape(value: Any) -> Any:
    """Return ``value`` with every leaf replaced by None, and a list by the shape of its last element."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[-1])] if value else []
    return None


def leaves(names: str) -> dict[str, None]:
    return dict.fromkeys(names.split())


SPREAD, ESTIMATE = leaves("median min max"), leaves("value standard_error")
MACHINE = {
    **leaves("device cores memory_bytes system"),
    "versions": leaves("python neuronmm torch transformers"),
}
COMPRESSION = leaves("factors method targets asked_ratio realised_ratio model_ratio align")
VARIANT = leaves("kernels load_seconds weight_bytes weight_bytes_per_token")
FIGURES = {
    "ttft": SPREAD,
    "tpot": {**SPREAD, "p90": None},
    **leaves("decode_tokens_per_second prefill_tokens_per_second bandwidth_share limit_tokens_per_second"),
    **leaves("peak_memory_bytes warm_up_seconds"),
    "runs": [leaves("ttft tpot")],
}
BENCHMARK = {
    **leaves("kind what model baseline backend"),
    "compression": COMPRESSION,
    "machine": MACHINE,
    **leaves("dtype threads runs new_tokens"),
    "read_bandwidth": {**leaves("unit buffer_bytes"), **SPREAD},
    "variants": {
        "dense": {**VARIANT, "factor_bytes": {}},
        "naive": {**VARIANT, "factor_bytes": {"float32": None}},
        "fused": {**VARIANT, "factor_bytes": {"float32": None}},
    },
    "points": [
        {
            **leaves("batch prompt_length"),
            "rounds": [leaves("probe_before probe_after stalled")],
            "variants": {"dense": FIGURES, "naive": FIGURES, "fused": FIGURES},
        }
    ],
}
MODELS = ("baseline", "model")
EVALUATION = {
    **leaves("kind what"),
    "models": dict.fromkeys(MODELS, leaves("path dtype")),
    "text": {
        **leaves("file context stride windows scored_tokens text_tokens"),
        "nats_per_token_by_window": {key: [None] for key in MODELS},
    },
    "tasks": {"task": None},
    "guessing": {"task": None},
    "results": [{"measure": None, "models": dict.fromkeys(MODELS, ESTIMATE), "difference": ESTIMATE}],
    "notes": [None],
    "settings": {**leaves("text context stride"), "tasks": [None], **leaves("limit dtype backend weight_dtype")},
}
PREDICTED = leaves("ttft tpot tokens_per_second weight_bytes cache_bytes fits")
PREDICTION = {
    **leaves("kind what model device cores batch prompt_length targets realised_ratio"),
    "dense": PREDICTED,
    "compressed": PREDICTED,
    "validation": {
        **leaves("published_kernel_latencies_mean_absolute_error published_dense_decode_error"),
        **leaves("published_dense_context_encoding_error ttft measured_on"),
    },
}
TILING = {
    **leaves("kind what"),
    "problem": leaves("tokens inputs rank outputs dtype norm residual tokens_first form pivots factors"),
    "device": None,
    "blocks": leaves("tokens moving depth intermediate panels"),
    **leaves("seconds tensor dma vector traffic"),
    "sbuf": [None],
    **leaves("psum_banks mfu"),
}
MEASURED = {
    **leaves("bytes bits"),
    "perplexity": {"text": ESTIMATE},
    "dtype": None,
    "accuracy": {**ESTIMATE, "tasks": {"task": ESTIMATE}},
    "speed": leaves("tokens_per_second slowest fastest dense_beside speed_up"),
}
FACTS = {**leaves("targets folder"), **leaves("realised_ratio model_ratio seconds peak_rss_bytes")}
POINT = {**leaves("name ratio"), "settings": {"method": None}, **FACTS, **MEASURED}
SETTINGS = {
    "model": None,
    "texts": {"text": None},
    **leaves("context limit"),
    "tasks": {"task": None},
    **leaves("questions speed"),
}


@pytest.fixture
def run(checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``run("evaluate {low} --text {text}")``: run a command and return the shape of its JSON document."""
    (tmp_path / "text.txt").write_text(" ".join(f"w{3 + i % 60}" for i in range(100)))
    (tmp_path / "task.jsonl").write_text('{"query": "w3", "choices": ["w4", "w5"], "gold": 0}\n' * 3)
    (tmp_path / "recipe.yaml").write_text("align: 2\ncalibration_rows: 4\ncalibration_length: 12\n")
    paths = {"low": checkpoint(), "dense": checkpoint(compressed=False), "here": tmp_path}

    def call(command: str) -> Any:
        assert main(command.format(**paths).split()) == 0
        return shape(json.loads(capsys.readouterr().out.splitlines()[-1]))

    return call


def check(found: Any, expected: Any) -> None:
    assert json.dumps(found, indent=1) == json.dumps(expected, indent=1)  # compares the order too


def test_benchmark(run: Callable[..., Any]) -> None:
    check(run("benchmark {low} --baseline {dense} --prompt-lengths 4 --new-tokens 3 --runs 2"), BENCHMARK)


def test_evaluate(run: Callable[..., Any]) -> None:
    quality = "--text {here}/text.txt --tasks {here}/task.jsonl --context 20"
    check(run("evaluate {low} --baseline {dense} " + quality), EVALUATION)
    one_model = run("evaluate {low} " + quality)
    assert list(one_model["results"][0]) == ["measure", "models"]


def test_predict(run: Callable[..., Any]) -> None:
    check(run("predict {low} --json"), PREDICTION)


def test_tiling(run: Callable[..., Any]) -> None:
    check(run("tiling --shape 128,256,128,256 --json"), TILING)


def test_sweep(run: Callable[..., Any], tmp_path: Path) -> None:
    quality = "--text {here}/text.txt --tasks {here}/task.jsonl --context 20 --speed"
    result = run("sweep {dense} -o {here}/out --recipe {here}/recipe.yaml --ratios 0.3 --methods svd " + quality)
    base, contents = result.pop("base"), result.pop("contents")
    points = [{**POINT, "fronts": result["points"][0]["fronts"]}]
    assert "align" in base and not {"ratio", "method"} & base.keys()
    check(result, {**leaves("kind what"), **SETTINGS, "costs": [None], "machine": MACHINE, "points": points})
    files = {"svd-0.3.point.json": POINT, "dense.point.json": {**leaves("name ratio"), **MEASURED}}
    assert [Path(name).name for name in contents] == ["llama-dense", "text.txt", "task.jsonl"]
    files |= {"run.json": {**SETTINGS, "base": base, "contents": contents}}
    for name, expected in files.items():
        check(shape(json.loads((tmp_path / "out" / name).read_text())), expected)
