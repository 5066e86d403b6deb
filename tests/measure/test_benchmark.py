"""The benchmark: exact byte counts, a complete document, flags and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from neuronmm.engine.backends.cpu import CpuRunner
from neuronmm.engine.backends.torch_runner import TorchRunner
from neuronmm.kernels.cpu import core
from neuronmm.measure.bandwidth import BandwidthProbe, weight_bytes, weight_bytes_per_step
from neuronmm.measure.benchmark import benchmark, run_benchmark
from neuronmm.measure.benchmark_result import Round, Run, VariantRuns, summarise_point
from neuronmm.measure.config import BenchmarkConfig
from neuronmm.measure.machine import measure_growth
from neuronmm.measure.report import print_benchmark, write_benchmark
from neuronmm.models import CompressionSpec, UserError
from neuronmm.models.load import load_pretrained
from tiny_models import make_tiny, shared_spec

SMALL: dict[str, Any] = {"prompt_lengths": (4, 9), "new_tokens": 4, "batches": (1, 2), "runs": 2, "dtype": "fp32"}


def test_document(checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = BenchmarkConfig(checkpoint(compressed=True), checkpoint(compressed=False), **SMALL)
    measured = run_benchmark(config)
    result = measured.to_json()
    assert result["kind"] == "measured"
    assert list(result["variants"]) == ["dense", "naive", "fused"]
    assert "naive" in result["variants"]["naive"]["kernels"]
    assert [(p["batch"], p["prompt_length"]) for p in result["points"]] == [(1, 4), (1, 9), (2, 4), (2, 9)]
    for point in result["points"]:
        assert len(point["rounds"]) == SMALL["runs"]
        for name, figures in point["variants"].items():
            tpot, ttft = figures["tpot"], figures["ttft"]
            assert 0 < tpot["min"] <= tpot["median"] <= tpot["max"]
            assert tpot["p90"] > 0
            assert figures["decode_tokens_per_second"] == pytest.approx(point["batch"] / tpot["median"])
            tokens = point["batch"] * point["prompt_length"]
            assert figures["prefill_tokens_per_second"] == pytest.approx(tokens / ttft["median"])
            step_bytes = result["variants"][name]["weight_bytes_per_token"]
            limit = figures["limit_tokens_per_second"]
            assert figures["bandwidth_share"] == pytest.approx(figures["decode_tokens_per_second"] / limit)
            assert limit < point["batch"] * result["read_bandwidth"]["max"] / step_bytes * 1.001
            assert figures["warm_up_seconds"] > 0
            assert len(figures["runs"]) == SMALL["runs"]
    write_benchmark(measured, tmp_path)
    assert json.loads((tmp_path / "benchmark.json").read_text()) == result
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    print_benchmark(measured)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("measured", "TTFT ms", "TPOT ms", "naive", "fused", "read bandwidth"))


def test_int8_factors_are_reported(checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Counts for two layers: A [8, 32] for q, k, v, A [12, 32] for gate, up; 1 byte per element, 4 per row."""
    folder = checkpoint(spec=shared_spec(factors="int8"))
    small = {**SMALL, "batches": (1,), "prompt_lengths": (4,)}
    measured = run_benchmark(BenchmarkConfig(folder, checkpoint(compressed=False), **small))
    result = measured.to_json()
    elements = 8 * 32 + (32 + 16 + 16) * 8 + 12 * 32 + 2 * 48 * 12 + 8 * (32 + 48)
    rows = 8 + (32 + 16 + 16) + 12 + 2 * 48 + 8 + 32
    factors = 2 * (elements + 4 * rows)
    dense, naive, fused = (result["variants"][name] for name in ("dense", "naive", "fused"))
    assert result["compression"]["factors"] == "int8"
    assert dense["factor_bytes"] == {} and naive["factor_bytes"] == fused["factor_bytes"] == {"int8": factors}
    norms, o_proj, head = 2 * 2 * 32 + 32, 2 * 32 * 32, 64 * 32
    assert fused["weight_bytes_per_token"] == factors + 4 * (norms + o_proj + head)
    if core() is not None:
        assert "whole step in C++" in fused["kernels"]
    print_benchmark(measured)
    printed = capsys.readouterr().out
    assert "of them int8 factors; kernels: " in printed
    rows = [line.split("│")[3:5] for line in printed.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [["dense", "none"], ["naive", "int8"], ["fused", "int8"]]


def test_the_baseline_is_what_the_model_was_made_from(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    make_tiny(hidden_size=64).save_pretrained(tmp_path / "wider")
    with pytest.raises(
        UserError, match=r"is not what .* was made from \(hidden_size 64, not 32\); give its dense model"
    ):
        benchmark(checkpoint(), baseline=tmp_path / "wider", **SMALL)


def test_a_dense_model_alone(checkpoint: Callable[..., Path]) -> None:
    result = benchmark(checkpoint(compressed=False), **{**SMALL, "batches": (1,), "prompt_lengths": (4,)})
    assert list(result["variants"]) == ["dense"]
    assert result["compression"] is None


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_bytes_per_token_are_exact(checkpoint: Callable[..., Path], tied: bool) -> None:
    """Counts for hidden 32, intermediate 48, 4 query and 2 KV heads of 8, vocabulary 64, two layers."""
    attention = 32 * 32 + 16 * 32 + 16 * 32 + 32 * 32
    norms = 2 * 32
    dense_layer = attention + norms + 3 * 32 * 48
    head = 64 * 32
    dense = 4 * (2 * dense_layer + 32 + head)
    model = make_tiny(tied=tied)
    assert weight_bytes_per_step(model) == dense
    assert weight_bytes(model) == dense + (0 if tied else 4 * head)
    ranks = {"gate": 12, "up": 16, "down": 8, "q": 8}
    low_rank = (ranks["gate"] + ranks["up"] + ranks["down"]) * (32 + 48) + ranks["q"] * (32 + 32)
    compressed = 4 * (2 * (attention - 32 * 32 + norms + low_rank) + 32 + head)
    assert weight_bytes_per_step(load_pretrained(checkpoint(tied=tied), torch.float32)) == compressed
    # Shared: one A [8, 32] for q, k and v, one A [12, 32] for gate and up; o is dense.
    qkv, gate_up, down = 8 * 32 + (32 + 16 + 16) * 8, 12 * 32 + 2 * 48 * 12, ranks["down"] * (32 + 48)
    shared = 4 * (2 * (qkv + 32 * 32 + norms + gate_up + down) + 32 + head)
    folder = checkpoint("qwen3", tied=tied, spec=shared_spec())
    qk_norms = 4 * 2 * 2 * 8
    assert weight_bytes_per_step(load_pretrained(folder, torch.float32)) == shared + qk_norms
    assert weight_bytes_per_step(CpuRunner(load_pretrained(folder, torch.float32)).model) == shared + qk_norms


@pytest.mark.parametrize("spec", [None, shared_spec()], ids=["own A", "shared A"])
def test_siblings_share_weights_but_not_kernels(checkpoint: Callable[..., Path], spec: CompressionSpec | None) -> None:
    host = TorchRunner(load_pretrained(checkpoint(spec=spec), torch.float32), "auto")
    naive = host.sibling("naive")
    assert weight_bytes(naive.model) == weight_bytes(host.model)
    pairs = list(zip(host.model.parameters(), naive.model.parameters(), strict=True))
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
    assert naive.path == "low_rank_linear=naive, low_rank_swiglu=naive"
    assert "naive" not in host.path


def test_disturbed_rounds_are_flagged_and_kept() -> None:
    rounds = [Round(10e9, 10e9) for _ in range(4)]
    rounds[1].probe_after = 5e9
    runs = [Run(0.1, [0.01] * 3) for _ in range(4)]
    runs[3] = Run(0.1, [0.1] * 3)
    point = summarise_point(1, 4, rounds, {"dense": VariantRuns(runs, 1.0, None, 100)})
    assert [entry.stalled for entry in point.rounds] == [False, True, False, True]
    assert point.variants["dense"].tpot.max == pytest.approx(0.1)
    assert point.variants["dense"].tpot.median == pytest.approx(0.01), "the mean would be 0.0325"
    assert len(point.variants["dense"].runs) == 4
    assert point.variants["dense"].limit_tokens_per_second == 10e9 / 100, "the median probe over the bytes of a step"


def test_progress_has_one_stage_per_point(checkpoint: Callable[..., Path]) -> None:
    fractions: dict[str, float] = {}

    def progress(stage: str, fraction: float) -> None:
        fractions[stage] = fractions.get(stage, 0) + fraction

    benchmark(checkpoint(), progress=progress, **{**SMALL, "batches": (1,)})
    assert list(fractions) == ["batch 1, prompt 4", "batch 1, prompt 9"]
    assert list(fractions.values()) == pytest.approx([1, 1])


def test_memory_growth_counts_a_large_allocation() -> None:
    growth = measure_growth(lambda: torch.ones(32 * 2**20).sum(), torch.device("cpu"))
    if growth is None:
        pytest.skip("this system cannot reset the peak of resident memory")
    assert 0.9 * 2**27 < growth < 2**28


def test_memory_growth_does_not_count_the_peak_of_the_parent_process() -> None:
    large = torch.ones(64 * 2**20)  # 256 MiB in this process, the parent
    code = "import torch; from neuronmm.measure.machine import measure_growth as m; print(m(int, torch.device('cpu')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if done.stdout.strip() == "None":
        pytest.skip("this system cannot reset the peak of resident memory")
    assert int(done.stdout) < 2**26 < large.nbytes


def test_probe_reads_its_buffer() -> None:
    probe = BandwidthProbe(1, torch.device("cpu"))
    assert probe.nbytes == 64 * 2**20
    assert probe() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": 0}, "--runs"),
        ({"new_tokens": 1}, "--new-tokens"),
        ({"batches": (0,)}, "--batch"),
        ({"prompt_lengths": ()}, "--prompt-lengths"),
        ({"threads": 0}, "--threads"),
        ({"prompt_lengths": (126,)}, "exceed the model's context of 128"),
        ({"backend": "neuron"}, "transformers-neuronx"),
    ],
)
def test_values_out_of_range(checkpoint: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        benchmark(checkpoint(compressed=False), **{**SMALL, **changes})


def test_models_that_cannot_be_compared(checkpoint: Callable[..., Path]) -> None:
    dense, compressed = checkpoint(compressed=False), checkpoint()
    with pytest.raises(UserError, match="is a dense model"):
        benchmark(dense, dense, **SMALL)
    with pytest.raises(UserError, match="compressed model itself"):
        benchmark(compressed, compressed, **SMALL)


@pytest.mark.parametrize("steps", [[0.01], [0.01, 0.02], [0.01, 0.02, 0.04]])
def test_the_ninth_decile_of_few_steps_is_not_above_the_slowest(steps: list[float]) -> None:
    runs = VariantRuns([Run(0.1, steps)], 0.0, None, 1000)
    point = summarise_point(1, 4, [Round(1e9, 1e9)], {"dense": runs})
    assert sum(steps) / len(steps) <= point.variants["dense"].tpot.p90 <= max(steps)
    expected = {1: 0.01, 2: 0.019, 3: 0.036}[len(steps)]
    assert point.variants["dense"].tpot.p90 == pytest.approx(expected), "linear between the two nearest"
